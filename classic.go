package knoc

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// What the first KNoC exported, for programs that vendor it. Such a program
// brings its own virtual-kubelet: pods come through CreatePod, statuses go
// through the function given to NotifyPods, and nobody here talks to the API
// server.

// ResourceManager is where pods' ConfigMaps and Secrets come from. The manager
// of virtual-kubelet's node-cli is one. A missing object is an error for which
// IsNotFound of k8s.io/apimachinery/pkg/api/errors holds.
type ResourceManager interface {
	GetConfigMap(name, namespace string) (*v1.ConfigMap, error)
	GetSecret(name, namespace string) (*v1.Secret, error)
}

// Modes of RemoteExecution.
const (
	RemoteExecutionCreate int8 = 0
	RemoteExecutionDelete int8 = 1
)

// NewProvider makes a provider from a provider config file, as the first KNoC
// did; see NewProviderConfig.
func NewProvider(providerConfig, nodeName, operatingSystem, internalIP string, rm ResourceManager, daemonEndpointPort int32) (*KNOCProvider, error) {
	config, err := loadNodeConfig(providerConfig, nodeName)
	if err != nil {
		return nil, err
	}
	return newClassic(config, nodeName, operatingSystem, internalIP, rm, daemonEndpointPort)
}

// NewProviderConfig makes a provider. How to reach the cluster is in the
// environment, as it was for the first KNoC: REMOTE_HOST, REMOTE_PORT,
// REMOTE_USER, REMOTE_KEY; and new, all optional: KNOC_SSH_KNOWN_HOSTS,
// KNOC_SSH_JUMP, KNOC_SSH_KEY_PASSPHRASE_FILE, KNOC_REMOTE_DIR, KNOC_PARTITION,
// KNOC_RUNTIME, KNOC_INSECURE_REGISTRY, as the flags of the same names, and
// KNOC_CLUSTER_ID, needed where several clusters have a node of this name.
//
// It connects to nothing and starts nothing. The loop that does the work starts
// with the first CreatePod, NotifyPods or RemoteExecution and runs until Close.
func NewProviderConfig(config KNOCConfig, nodeName, operatingSystem, internalIP string, rm ResourceManager, daemonEndpointPort int32) (*KNOCProvider, error) {
	config = config.or(KNOCConfig{defaultCPUCapacity, defaultMemoryCapacity, defaultPodCapacity})
	return newClassic(NodeConfig{KNOCConfig: config}, nodeName, operatingSystem, internalIP, rm, daemonEndpointPort)
}

func newClassic(config NodeConfig, nodeName, operatingSystem, internalIP string, rm ResourceManager, port int32) (*KNOCProvider, error) {
	if _, err := config.capacity(); err != nil {
		return nil, err
	}
	if operatingSystem != "" && !strings.EqualFold(operatingSystem, OperatingSystemLinux) {
		return nil, fmt.Errorf("operating system %q: pods run as Slurm jobs in Apptainer, which is Linux only", operatingSystem)
	}
	address := os.Getenv("REMOTE_HOST")
	if address == "" {
		return nil, errors.New("REMOTE_HOST is not set: it names the cluster's login node")
	}
	if p := os.Getenv("REMOTE_PORT"); p != "" {
		address = net.JoinHostPort(address, p)
	}
	if user := os.Getenv("REMOTE_USER"); user != "" {
		address = user + "@" + address
	}
	words := func(name string) []string {
		return strings.FieldsFunc(os.Getenv(name), func(r rune) bool { return r == ',' || r == ' ' })
	}
	cluster := os.Getenv("KNOC_CLUSTER_ID")
	if cluster == "" {
		cluster = "classic"
	}
	p, err := newProvider(Config{
		NodeName: nodeName, OS: operatingSystem, InternalIP: internalIP, ClusterID: cluster,
		SSH: SSHConfig{
			Address: address, KeyFile: os.Getenv("REMOTE_KEY"), PassphraseFile: os.Getenv("KNOC_SSH_KEY_PASSPHRASE_FILE"),
			KnownHosts: words("KNOC_SSH_KNOWN_HOSTS"), Jumps: words("KNOC_SSH_JUMP"),
		},
		RemoteDir: os.Getenv("KNOC_REMOTE_DIR"), Partition: os.Getenv("KNOC_PARTITION"), Runtime: os.Getenv("KNOC_RUNTIME"),
		InsecureRegistries: words("KNOC_INSECURE_REGISTRY"),
	}, config, managed{rm}, nil)
	if err != nil {
		return nil, err
	}
	p.lazy = &lazyLoop{port: port, done: make(chan struct{})}
	return p, nil
}

// lazyLoop is the loop of a provider that nobody runs.
type lazyLoop struct {
	port int32 // of the program's kubelet

	mu      sync.Mutex
	stop    context.CancelFunc // nil until it was started
	closed  bool
	done    chan struct{} // closed when the loop has ended
	outcome error
}

// begin starts the loop of a classic provider, once.
func (p *KNOCProvider) begin() {
	z := p.lazy
	if z == nil {
		return // Run has the loop
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.stop != nil || z.closed {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	z.stop = cancel
	go func() {
		z.outcome = p.run(ctx)
		if ctx.Err() == nil {
			p.log.Error("knoc's loop has ended: pods are not looked after any more", "err", z.outcome)
		}
		close(z.done)
	}()
}

// started waits until the remote directory is known.
func (p *KNOCProvider) started(ctx context.Context) error {
	p.begin()
	var ended chan struct{}
	if p.lazy != nil {
		ended = p.lazy.done
	}
	select {
	case <-p.adopted():
		return nil
	case <-ended:
		if p.lazy.outcome != nil {
			return p.lazy.outcome
		}
		return errors.New("the provider is closed")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close ends the loop and the connections of a provider made by NewProvider.
// Jobs go on; a new provider for the same node takes them over.
func (p *KNOCProvider) Close() error {
	z := p.lazy
	if z == nil {
		return p.ssh.Close()
	}
	z.mu.Lock()
	z.closed = true
	stop := z.stop
	z.mu.Unlock()
	if stop == nil {
		return p.ssh.Close()
	}
	stop()
	<-z.done
	return nil
}

// managed is a ResourceManager as what stageVolumes and stageEnv read from.
type managed struct{ rm ResourceManager }

var _ objects = managed{}

func (m managed) ConfigMap(_ context.Context, namespace, name string) (*v1.ConfigMap, error) {
	if m.rm == nil {
		return nil, fmt.Errorf("configmap %s/%s: the provider was made without a ResourceManager", namespace, name)
	}
	return m.rm.GetConfigMap(name, namespace)
}

func (m managed) Secret(_ context.Context, namespace, name string) (*v1.Secret, error) {
	if m.rm == nil {
		return nil, fmt.Errorf("secret %s/%s: the provider was made without a ResourceManager", namespace, name)
	}
	return m.rm.GetSecret(name, namespace)
}

// Services gives none: the virtual-kubelet of a fork resolves the environment of
// the pods that it hands over.
func (m managed) Services(context.Context, string, string) ([]v1.Service, error) { return nil, nil }

// Token refuses: a ResourceManager only reads.
func (m managed) Token(_ context.Context, pod *v1.Pod, _ string, _ int64) (string, time.Time, error) {
	return "", time.Time{}, refuse("ServiceAccountTokenUnavailable",
		"pod %s/%s asks for a service account token, which a classic ResourceManager cannot request; set automountServiceAccountToken: false, or run knoc itself", pod.Namespace, pod.Name)
}

// ConfigureNode describes the node, as virtual-kubelet's node-cli asks for.
func (p *KNOCProvider) ConfigureNode(_ context.Context, n *v1.Node) {
	n.Status.Capacity, n.Status.Allocatable = p.capacity(), p.capacity()
	n.Status.Conditions = nodeConditions(p.nodeState(), n.Status.Conditions, metav1.Now())
	n.Status.Addresses = p.addresses()
	n.Status.DaemonEndpoints = *p.endpoints()
	n.Status.NodeInfo.OperatingSystem = strings.ToLower(p.operatingSystem())
	n.Status.NodeInfo.Architecture = runtime.GOARCH
	if n.Labels == nil {
		n.Labels = map[string]string{}
	}
	n.Labels[v1.LabelOSStable] = strings.ToLower(p.operatingSystem())
	n.Labels[v1.LabelArchStable] = runtime.GOARCH
	// A load balancer cannot send packets to a node that has no kube-proxy.
	n.Labels["alpha.service-controller.kubernetes.io/exclude-balancer"] = "true"
	n.Labels[v1.LabelNodeExcludeBalancers] = "true"
}

func (p *KNOCProvider) capacity() v1.ResourceList {
	list := v1.ResourceList{}
	if s := p.nodeState(); s.Known {
		list = slurmCapacity(s.Resources)
	}
	fixed, _ := p.node.capacity() // was checked when the provider was made
	for name, q := range fixed {
		list[name] = q
	}
	return list
}

func (p *KNOCProvider) addresses() []v1.NodeAddress {
	if p.cfg.InternalIP == "" {
		return nil
	}
	return []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: p.cfg.InternalIP}}
}

func (p *KNOCProvider) endpoints() *v1.NodeDaemonEndpoints {
	e := &v1.NodeDaemonEndpoints{}
	if p.lazy != nil {
		e.KubeletEndpoint.Port = p.lazy.port
	}
	return e
}

var (
	uuidPattern  = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	plainPattern = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$`)
	notPlain     = regexp.MustCompile(`[^A-Za-z0-9-]+`)
)

// BuildRemoteExecutionPodName is a name for the pod on the cluster, one that no
// other pod has: namespace and UID. It is valid as the name of a file and of a
// job, and at most 100 bytes long.
func BuildRemoteExecutionPodName(pod *v1.Pod) string {
	if uuidPattern.MatchString(string(pod.UID)) {
		return labelOf(pod.Namespace) + "-" + string(pod.UID)
	}
	// Static pods have other UIDs, pods that were never in an API server none.
	return labelOf(pod.Namespace) + "-" + digest(pod.Namespace, string(pod.UID), pod.Name)
}

// BuildRemoteExecutionInstanceName is a name for one container of the pod on
// the cluster: BuildRemoteExecutionPodName and the container's own name, since
// two containers may share an image. It is at most 164 bytes long.
func BuildRemoteExecutionInstanceName(container v1.Container, pod *v1.Pod) string {
	return BuildRemoteExecutionPodName(pod) + "-" + labelOf(container.Name)
}

// labelOf is s when it is a name as Kubernetes allows them (RFC 1123 label), else
// a name like it with a digest, so that different ones stay different.
func labelOf(s string) string {
	if len(s) <= 63 && plainPattern.MatchString(s) {
		return s
	}
	short := strings.Trim(notPlain.ReplaceAllString(s, "-"), "-")
	return strings.TrimLeft(short[:min(len(short), 40)]+"-"+digest(s), "-")
}

func digest(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return hex.EncodeToString(sum[:8])
}

// onePod is a pod of that one container, named for the remote side: its own
// volumes, no init containers, and no restart, as the first KNoC ran it.
func onePod(pod *v1.Pod, container v1.Container) *v1.Pod {
	one := pod.DeepCopy()
	one.Spec.InitContainers, one.Spec.EphemeralContainers = nil, nil
	one.Spec.Containers = []v1.Container{*container.DeepCopy()}
	one.Spec.RestartPolicy = v1.RestartPolicyNever
	one.Spec.Volumes = nil
	for _, v := range pod.Spec.Volumes {
		for _, m := range container.VolumeMounts {
			if m.Name == v.Name {
				one.Spec.Volumes = append(one.Spec.Volumes, v)
				break
			}
		}
	}
	return one
}

// PrepareContainerData puts all that one container's job needs into a directory
// of its own on the cluster, over a connection of the caller: classic/<instance>
// in the node's directory, which the loop neither reads nor sweeps. emptyDir
// volumes are shared with the pod's other containers. It may be called again:
// what is there stays.
func PrepareContainerData(p *KNOCProvider, ctx context.Context, client *ssh.Client, instanceName string, container v1.Container, pod *v1.Pod) error {
	if !plainPattern.MatchString(instanceName) {
		return fmt.Errorf("instance name %q: only letters, digits and dashes may be in it, as in those of BuildRemoteExecutionInstanceName", instanceName)
	}
	if err := p.started(ctx); err != nil {
		return err
	}
	c := p.classicRemote()
	files, _, _, err := p.stageIn(ctx, onePod(pod, container), c.dir+"/"+instanceName)
	if err != nil {
		return fmt.Errorf("container %s of pod %s/%s: %w", container.Name, pod.Namespace, pod.Name, err)
	}
	shared, files := sharedDirs(pod, files)
	var stream bytes.Buffer
	suffix := ".new-" + rand.Text()
	if err := writeTar(&stream, []submission{{UID: types.UID(instanceName), Files: files}}, suffix); err != nil {
		return err
	}
	script, err := render("classicstage.sh.tmpl", map[string]any{
		"Dir": p.remote.dir, "Epoch": c.epoch, "Instance": instanceName, "New": instanceName + suffix,
		"Pod": BuildRemoteExecutionPodName(pod), "Shared": shared,
	})
	if err != nil {
		return err
	}
	if err := runOver(ctx, client, script, &stream, "staged "+instanceName); err != nil {
		return fmt.Errorf("staging container %s of pod %s/%s: %w", container.Name, pod.Namespace, pod.Name, err)
	}
	return nil
}

// RemoteExecution creates (mode 0) or deletes (mode 1) a job of one container,
// apart from all that the loop does: it has a directory of its own and is named
// by BuildRemoteExecutionInstanceName. The image is a docker:// reference or the
// absolute path of a SIF file; "" is the container's own. Creating what exists
// already does nothing; deleting returns once Slurm no longer has the job.
func RemoteExecution(p *KNOCProvider, ctx context.Context, mode int8, imageLocation string, pod *v1.Pod, container v1.Container) error {
	instance := BuildRemoteExecutionInstanceName(container, pod)
	if err := p.started(ctx); err != nil {
		return err
	}
	c := p.classicRemote()
	switch mode {
	case RemoteExecutionCreate:
		if imageLocation != "" {
			container.Image = strings.TrimPrefix(imageLocation, "docker://")
		}
		client, err := p.ssh.client(ctx)
		if err != nil {
			return err
		}
		if err := PrepareContainerData(p, ctx, client, instance, container, pod); err != nil {
			return err
		}
		replies, err := c.submit(ctx, []submission{{UID: types.UID(instance), Action: actionSubmit}})
		if err != nil {
			return fmt.Errorf("submitting container %s of pod %s/%s: %w", container.Name, pod.Namespace, pod.Name, err)
		}
		if r := replies[types.UID(instance)]; r.outcome != submitted {
			// Whether Slurm has it all the same is unknown: deleting ends that doubt.
			return fmt.Errorf("submitting container %s of pod %s/%s: %s; delete it before another try", container.Name, pod.Namespace, pod.Name, r.Text)
		}
		return nil
	case RemoteExecutionDelete:
		grace := gracePeriod(pod)
		err := c.change(ctx, "classicdelete.sh.tmpl", map[string]any{
			"Instance": instance, "Pod": BuildRemoteExecutionPodName(pod), "Job": jobName(types.UID(instance)),
			"Seconds": grace + int64(stopSlack/time.Second),
		}, nil, nil)
		if err != nil {
			return fmt.Errorf("deleting container %s of pod %s/%s: %w", container.Name, pod.Namespace, pod.Name, err)
		}
		return nil
	}
	return fmt.Errorf("remote execution: mode %d is neither %d (create) nor %d (delete)", mode, RemoteExecutionCreate, RemoteExecutionDelete)
}

// classicRemote is the directory of the single containers' jobs. It is one like
// the loop's own, within it: classicstage.sh.tmpl gives it the same epochs.
func (p *KNOCProvider) classicRemote() *remote {
	r := p.remote
	return &remote{ssh: r.ssh, node: r.node, base: r.base, root: r.root, log: r.log, dir: r.dir + "/classic", user: r.user, epoch: r.currentEpoch()}
}

// sharedDirs takes the pod's emptyDir volumes out of one container's files:
// their directories, relative to the pod's shared one, parents first. The first
// KNoC had them in one place for the pod's containers.
func sharedDirs(pod *v1.Pod, files []file) (shared []string, rest []file) {
	empty := map[string]bool{}
	for i := range pod.Spec.Volumes {
		if v := &pod.Spec.Volumes[i]; isEmptyDir(v) {
			empty[v.Name] = true
		}
	}
	for _, f := range files {
		name, ok := strings.CutPrefix(f.Name, "vol/")
		volume, _, _ := strings.Cut(name, "/")
		if ok && empty[volume] && f.Mode&fs.ModeDir != 0 {
			shared = append(shared, name)
			continue
		}
		rest = append(rest, f)
	}
	return shared, rest
}

// runOver runs a script over a connection that is not ours. Only its last line
// says that it did all it should: a login shell that ends early says nothing.
func runOver(ctx context.Context, client *ssh.Client, script string, in io.Reader, last string) error {
	script = group(script)
	s, err := client.NewSession()
	if err != nil {
		return fmt.Errorf("%w: opening a session: %w", errConnection, err)
	}
	defer s.Close()
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	stdout, stderr := &tail{max: 1024}, &tail{max: 1024}
	s.Stdin, s.Stdout, s.Stderr = io.MultiReader(strings.NewReader(script), in), stdout, stderr
	err = s.Run(remoteCommand(len(script)))
	var status *ssh.ExitError
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%w: %w", errConnection, context.Cause(ctx))
	case errors.As(err, &status) && status.ExitStatus() == exitFenced:
		return errFenced
	case errors.As(err, &status):
		return &exitError{status.ExitStatus(), stderr.String()}
	case err != nil:
		return fmt.Errorf("%w: %w", errConnection, err)
	case !strings.HasSuffix(strings.TrimSpace(stdout.String()), last):
		return fmt.Errorf("%w: the login shell did not run the script%s", errConnection, excerpt(": ", stdout.String()+stderr.String()))
	}
	return nil
}
