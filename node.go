package knoc

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/virtual-kubelet/virtual-kubelet/node"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	kubeletapis "k8s.io/kubelet/pkg/apis"
)

const (
	// kubernetesVersion is the kubelet version that the node claims: that of the
	// k8s.io modules in go.mod (a test holds them together).
	kubernetesVersion = "v1.37.2"
	// defaultPods is the kubelet's own default (--max-pods).
	defaultPods = 110
	// gpuResource is what pods ask for when they want GPUs.
	gpuResource v1.ResourceName = "nvidia.com/gpu"
	// defaultTaint keeps pods away that were not meant for an HPC cluster, such
	// as those of DaemonSets.
	defaultTaint = "virtual-kubelet.io/provider=knoc:NoSchedule"
)

// virtualNode is the Node object of this knoc and, for virtual-kubelet's
// NodeController, the NodeProvider behind it.
type virtualNode struct {
	name      string
	os        string
	version   string // of the kubelet
	image     string // node.status.nodeInfo.osImage
	labels    map[string]string
	taints    []v1.Taint
	fixed     v1.ResourceList // what the provider config sets
	addresses []v1.NodeAddress
	port      int32 // of the kubelet; 0: closed
	state     func() nodeState

	changed chan struct{} // capacity 1: state has something new

	mu         sync.Mutex
	conditions []v1.NodeCondition // the last ones, for their transition times
	capacity   v1.ResourceList    // of the object found at start, until Slurm answers
}

var _ node.NodeProvider = (*virtualNode)(nil)

// Ping never fails: virtual-kubelet would stop renewing the lease, and the
// control plane would evict every pod and so cancel every job, for an outage of
// the network that the jobs do not even notice.
func (n *virtualNode) Ping(context.Context) error { return nil }

// NotifyNodeStatus sends the node to virtual-kubelet whenever it changed.
func (n *virtualNode) NotifyNodeStatus(ctx context.Context, send func(*v1.Node)) {
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-n.changed:
				send(n.object())
			}
		}
	}()
}

// touch says that the node changed. It does not block.
func (n *virtualNode) touch() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// object is the Node as it should be now.
func (n *virtualNode) object() *v1.Node {
	state := n.state()
	n.mu.Lock()
	defer n.mu.Unlock()
	if state.Known {
		n.capacity = slurmCapacity(state.Resources)
	}
	capacity := n.capacity.DeepCopy()
	if capacity == nil {
		capacity = v1.ResourceList{}
	}
	for name, q := range n.fixed {
		capacity[name] = q
	}
	n.conditions = nodeConditions(state, n.conditions, metav1.Now())
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: n.labels, Annotations: map[string]string{}},
		Spec:       v1.NodeSpec{Taints: n.taints},
		Status: v1.NodeStatus{
			Capacity:        capacity,
			Allocatable:     capacity,
			Conditions:      append([]v1.NodeCondition(nil), n.conditions...),
			Addresses:       n.addresses,
			DaemonEndpoints: v1.NodeDaemonEndpoints{KubeletEndpoint: v1.DaemonEndpoint{Port: n.port}},
			Images:          state.Images,
			NodeInfo: v1.NodeSystemInfo{
				KubeletVersion:  n.version,
				OSImage:         n.image,
				OperatingSystem: n.os,
				Architecture:    n.labels[v1.LabelArchStable],
			},
		},
	}
}

// slurmCapacity is what sinfo says the partition has.
func slurmCapacity(r nodeResources) v1.ResourceList {
	list := v1.ResourceList{
		v1.ResourceCPU:    *resource.NewQuantity(r.CPUs, resource.DecimalSI),
		v1.ResourceMemory: *resource.NewQuantity(r.MemoryMB<<20, resource.BinarySI),
		v1.ResourcePods:   *resource.NewQuantity(defaultPods, resource.DecimalSI),
	}
	var gpus int64
	for _, n := range r.GPUs {
		gpus += n
	}
	if gpus > 0 {
		list[gpuResource] = *resource.NewQuantity(gpus, resource.DecimalSI)
	}
	return list
}

// nodeConditions are those that a kubelet reports. An outage of SSH or of
// slurmctld is NetworkUnavailable: the node lifecycle controller turns it into a
// NoSchedule taint, so that no pod comes and none is evicted, and it leaves the
// condition itself alone. Transition times are kept where nothing changed.
func nodeConditions(state nodeState, last []v1.NodeCondition, now metav1.Time) []v1.NodeCondition {
	network := v1.NodeCondition{
		Type: v1.NodeNetworkUnavailable, Status: v1.ConditionFalse,
		Reason: "SlurmReachable", Message: "knoc reaches the cluster over SSH and slurmctld answers",
	}
	switch {
	case state.Problem != "":
		network.Status, network.Reason = v1.ConditionTrue, "SlurmUnreachable"
		network.Message = strings.Join(strings.Fields(state.Problem), " ")
	case !state.Known:
		network.Reason, network.Message = "Starting", "slurmctld has not answered yet, and nothing has failed"
	}
	conditions := []v1.NodeCondition{
		{Type: v1.NodeReady, Status: v1.ConditionTrue, Reason: "KubeletReady", Message: "knoc is posting ready status"},
		// Memory, disk and processes are Slurm's to watch, per job.
		{Type: v1.NodeMemoryPressure, Status: v1.ConditionFalse, Reason: "ManagedBySlurm", Message: "Slurm keeps each job within its memory"},
		{Type: v1.NodeDiskPressure, Status: v1.ConditionFalse, Reason: "ManagedBySlurm", Message: "disk space is the cluster's quota"},
		{Type: v1.NodePIDPressure, Status: v1.ConditionFalse, Reason: "ManagedBySlurm", Message: "Slurm keeps each job within its limits"},
		network,
	}
	for i := range conditions {
		c := &conditions[i]
		c.LastHeartbeatTime, c.LastTransitionTime = now, now
		for _, l := range last {
			if l.Type == c.Type && l.Status == c.Status {
				c.LastTransitionTime = l.LastTransitionTime
			}
		}
	}
	return conditions
}

// newVirtualNode checks what the flags and the provider config say of the node.
func newVirtualNode(cfg Config, nc NodeConfig) (*virtualNode, error) {
	if errs := validation.IsDNS1123Subdomain(cfg.NodeName); len(errs) > 0 {
		return nil, fmt.Errorf("--nodename %q: %s", cfg.NodeName, errs[0])
	}
	if cfg.OS != "linux" {
		return nil, fmt.Errorf("--os %q: pods run as Slurm jobs in Apptainer, which is linux only", cfg.OS)
	}
	if cfg.InternalIP != "" && net.ParseIP(cfg.InternalIP) == nil {
		return nil, fmt.Errorf("--internal-ip %q is no IP address", cfg.InternalIP)
	}
	fixed, err := nc.capacity()
	if err != nil {
		return nil, err
	}
	taints, err := parseTaints(cfg.Taints)
	if err != nil {
		return nil, err
	}
	labels := map[string]string{
		v1.LabelOSStable:   cfg.OS,
		v1.LabelArchStable: runtime.GOARCH,
		v1.LabelHostname:   cfg.NodeName,
		"type":             "virtual-kubelet",
		// A load balancer cannot send packets to a node that has no kube-proxy.
		v1.LabelNodeExcludeBalancers: "true",
	}
	if err := addLabels(labels, cfg.Labels); err != nil {
		return nil, err
	}
	return &virtualNode{
		name:    cfg.NodeName,
		os:      cfg.OS,
		version: kubeletVersion(cfg.Version),
		image:   "Slurm cluster behind " + cfg.SSH.Address,
		labels:  labels,
		taints:  taints,
		fixed:   fixed,
		state:   func() nodeState { return nodeState{} },
		changed: make(chan struct{}, 1),
	}, nil
}

var notInVersion = regexp.MustCompile(`[^0-9A-Za-z.-]+`)

// kubeletVersion is Kubernetes' version with knoc's as the pre-release of a
// semantic version, since the control plane parses it.
func kubeletVersion(knoc string) string {
	if knoc = strings.Trim(notInVersion.ReplaceAllString(knoc, "-"), "-."); knoc == "" {
		knoc = "devel"
	}
	return kubernetesVersion + "-knoc-" + knoc
}

// parseTaints reads key[=value]:Effect words. None given is the default taint;
// the single word "none" is no taint at all.
func parseTaints(words []string) ([]v1.Taint, error) {
	if len(words) == 0 {
		words = []string{defaultTaint}
	}
	if len(words) == 1 && words[0] == "none" {
		return nil, nil
	}
	var taints []v1.Taint
	for _, w := range words {
		bad := func(why string) error {
			return fmt.Errorf("--taint %q: %s: write key=value:NoSchedule, or none", w, why)
		}
		kv, effect, ok := strings.Cut(w, ":")
		if !ok {
			return nil, bad("no effect")
		}
		switch v1.TaintEffect(effect) {
		case v1.TaintEffectNoSchedule, v1.TaintEffectPreferNoSchedule, v1.TaintEffectNoExecute:
		default:
			return nil, bad(fmt.Sprintf("%q is not NoSchedule, PreferNoSchedule or NoExecute", effect))
		}
		key, value, _ := strings.Cut(kv, "=")
		if errs := validation.IsQualifiedName(key); len(errs) > 0 {
			return nil, bad("bad key: " + errs[0])
		}
		if errs := validation.IsValidLabelValue(value); len(errs) > 0 {
			return nil, bad("bad value: " + errs[0])
		}
		for _, t := range taints {
			if t.Key == key && string(t.Effect) == effect {
				return nil, bad("given twice")
			}
		}
		taints = append(taints, v1.Taint{Key: key, Value: value, Effect: v1.TaintEffect(effect)})
	}
	return taints, nil
}

// addLabels adds key=value words, which win over what is there.
func addLabels(labels map[string]string, words []string) error {
	for _, w := range words {
		key, value, ok := strings.Cut(w, "=")
		if !ok {
			return fmt.Errorf("--label %q: write key=value", w)
		}
		if errs := validation.IsQualifiedName(key); len(errs) > 0 {
			return fmt.Errorf("--label %q: bad key: %s", w, errs[0])
		}
		if errs := validation.IsValidLabelValue(value); len(errs) > 0 {
			return fmt.Errorf("--label %q: bad value: %s", w, errs[0])
		}
		labels[key] = value
	}
	return nil
}

// allowedTo checks the labels against what a node identity may set on itself.
func (n *virtualNode) allowedTo(nodeIdentity string) error {
	if nodeIdentity == "" {
		return nil // some other identity: RBAC decides
	}
	if nodeIdentity != n.name {
		return fmt.Errorf("the kubeconfig is that of node %s and may not speak for node %s: use --nodename %s or another kubeconfig", nodeIdentity, n.name, nodeIdentity)
	}
	for _, key := range slices.Sorted(maps.Keys(n.labels)) {
		if forbiddenLabel(key) {
			return fmt.Errorf("--label %s: the API server does not let a node set this on itself (NodeRestriction): use kubectl label node %s", key, n.name)
		}
	}
	return nil
}

// forbiddenLabel is what admission plugin NodeRestriction forbids a node to set
// on itself (plugin/pkg/admission/noderestriction, getForbiddenLabels).
func forbiddenLabel(key string) bool {
	ns, _, ok := strings.Cut(key, "/")
	in := func(domain string) bool { return ns == domain || strings.HasSuffix(ns, "."+domain) }
	switch {
	case !ok:
		return false
	case in(v1.LabelNamespaceNodeRestriction):
		return true
	case in("kubernetes.io"), in("k8s.io"):
		return !kubeletapis.IsKubeletLabel(key)
	}
	return false
}

// adopt looks at the Node object that is there already. One that another kind
// of kubelet made is refused: two kubelets under one name ruin it for both.
func (n *virtualNode) adopt(ctx context.Context, c kubernetes.Interface, logger *slog.Logger) error {
	old, err := c.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	if old.Labels["type"] != "virtual-kubelet" && !strings.Contains(old.Status.NodeInfo.KubeletVersion, "knoc") {
		return fmt.Errorf("node %s exists and is not a virtual node (kubelet %q): choose another --nodename, or delete the node",
			n.name, old.Status.NodeInfo.KubeletVersion)
	}
	n.conditions, n.capacity = old.Status.Conditions, old.Status.Capacity
	for i := range n.taints {
		t := &n.taints[i]
		if !slices.ContainsFunc(old.Spec.Taints, func(o v1.Taint) bool { return t.MatchTaint(&o) && t.Value == o.Value }) {
			// NodeRestriction lets a node set its taints when it is made, never later.
			logger.Warn("the node exists without this taint: use kubectl taint node", "node", n.name, "taint", t.ToString())
		}
	}
	return nil
}

// recreate is virtual-kubelet's error handler for a node update that failed: a
// Node that somebody deleted is made again. Without it the pod garbage collector
// would take its pods away.
func (n *virtualNode) recreate(c kubernetes.Interface) node.ErrorHandler {
	return func(ctx context.Context, err error) error {
		if !apierrors.IsNotFound(err) {
			return err
		}
		_, err = c.CoreV1().Nodes().Create(ctx, n.object(), metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	}
}

// listen opens the kubelet port, if there is a TLS config for it, and notes in
// the node where the API server finds it.
//
// The node has an InternalIP and no Hostname address: the API server by default
// prefers the latter, and the name of a virtual node is in no DNS.
func (n *virtualNode) listen(cfg Config, files *kubeletFiles, apiServer string) (net.Listener, error) {
	address := cfg.InternalIP
	var l net.Listener
	if files == nil {
		cfg.Logger.Warn("the kubelet port stays closed, so kubectl logs and exec do not work: it needs --tls-cert, --tls-key and --client-ca")
	} else {
		var err error
		if l, err = tls.Listen("tcp", cfg.Listen, files.tlsConfig(cfg.Logger)); err != nil {
			return nil, fmt.Errorf("--listen %q: %w", cfg.Listen, err)
		}
		a := l.Addr().(*net.TCPAddr)
		n.port = int32(a.Port)
		if address == "" && !a.IP.IsUnspecified() {
			address = a.IP.String()
		}
	}
	if address == "" {
		address = addressTowards(apiServer)
	}
	if address != "" {
		n.addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: address}}
	} else if l != nil {
		l.Close()
		return nil, errors.New("this machine's address is unclear: give --internal-ip")
	}
	return l, nil
}

// addressTowards is the local address that packets to a URL's host leave from,
// "" when there is none. Connecting a UDP socket sends nothing.
func addressTowards(rawURL string) string {
	u, err := url.Parse(rawURL)
	if err != nil || u.Hostname() == "" {
		return ""
	}
	conn, err := net.Dial("udp", net.JoinHostPort(u.Hostname(), "443"))
	if err != nil {
		return ""
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).IP.String()
}
