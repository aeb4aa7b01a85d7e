// Package knoc runs Kubernetes pods as jobs of a Slurm cluster, over SSH, as a
// node of its own: a virtual-kubelet provider.
//
// One pod = one directory on the cluster + one Slurm job running one rendered
// POSIX sh script that appends facts to a journal. knoc is one reconcile loop
// that compares API pods with directories, jobs and journals over SSH, and tells
// Kubernetes what it saw.
//
// Run is the whole program; main/knoc only turns flags into a Config. What the
// first KNoC exported is still here for those who vendor it (classic.go).
package knoc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/virtual-kubelet/virtual-kubelet/log"
	"github.com/virtual-kubelet/virtual-kubelet/node"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	corev1informers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	statsv1alpha1 "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

// Config is all that knoc can be told. The zero value of every field works,
// except for SSH.Address: there is no default cluster.
type Config struct {
	// NodeName is the name of the virtual node; "" is "knoc".
	NodeName string
	// OS is what the node's pods run on: "" or "linux".
	OS string
	// Labels are more labels of the Node object, key=value; they win over knoc's own.
	Labels []string
	// Taints of the Node object, key=value:Effect. None is
	// virtual-kubelet.io/provider=knoc:NoSchedule; the single word "none" is no taint.
	// They are set when the Node is created, never later.
	Taints []string
	// InternalIP is the node's address, where the API server finds the kubelet
	// port; "" is the address that Listen names, or else the one by which this
	// machine reaches the API server.
	InternalIP string
	// ProviderConfig is a JSON or YAML file: node name → NodeConfig.
	ProviderConfig string

	// Kubeconfig is a file, or a list of them as in $KUBECONFIG; "" is the
	// service account of the pod that knoc runs in.
	Kubeconfig string
	// ClusterID tells clusters with equally named nodes apart on the HPC side; ""
	// is the UID of Service default/kubernetes.
	ClusterID string

	// SSH is the way to the login node.
	SSH SSHConfig
	// RemoteDir is where pods are kept on the cluster: an absolute path, or ""
	// for $KNOC_DIR or ~/.knoc there.
	RemoteDir string
	// Partition is the Slurm partition of every job; "" is Slurm's default.
	Partition string
	// Runtime is the container runtime on the compute nodes, a name or a path;
	// "" is apptainer.
	Runtime string
	// InsecureRegistries are host:port of image registries that speak plain HTTP.
	InsecureRegistries []string
	// ImageRewrites are rules from=to: images whose full name begins with from, such
	// as docker.io, are pulled from to, such as mirror.example.org/hub.
	ImageRewrites []string
	// ImageCacheLimit is how many bytes of images are kept on the cluster: what was
	// not used for longest goes first, and nothing that is used. 0 keeps all.
	ImageCacheLimit int64
	// WritableRoot is where what a container writes outside of its volumes goes:
	// "scratch", a directory on the compute node; "memory", the runtime's own tmpfs,
	// for runtimes that cannot do the first; "none", nowhere. "" is scratch.
	WritableRoot string
	// WithoutSubIDs is what becomes of a pod that names user or group ids where the
	// HPC user has no subordinate ids: "refuse" fails it; "ignore" runs it as the
	// HPC user, with an event. "" is refuse.
	WithoutSubIDs string
	// UsageInterval is how often a job writes down what its containers use, in
	// whole seconds; negative is never, 0 is 15 s.
	UsageInterval time.Duration
	// MetricsListen is the address of knoc's own metrics, /healthz and /readyz, in
	// plain HTTP and for everybody who reaches it; "" is none. Pprof adds Go's
	// profiles there.
	MetricsListen string
	Pprof         bool
	// ClusterDomain is the domain of the cluster's services, part of the host name
	// of pods with a subdomain; "" is cluster.local.
	ClusterDomain string
	// HostPaths are directories of the compute nodes that pods may mount by
	// hostPath, with all below them; none: no pod may.
	HostPaths []string
	// VolumePaths are PATH=DIRECTORY: what a persistentVolume (hostPath, local) has
	// at PATH, or an NFS server at SERVER:/EXPORT, the compute nodes have at DIRECTORY.
	VolumePaths []string
	// APIServerForPods is the API server's address, host or host:port, as the
	// compute nodes reach it: what containers find in KUBERNETES_SERVICE_HOST and its
	// like. "" is the address within the cluster.
	APIServerForPods string
	// Poll asks the cluster this often instead of holding a session that watches
	// it; 0 holds the session.
	Poll time.Duration

	// Listen is the address of the kubelet port; "" is ":10250".
	Listen string
	// TLSCert and TLSKey are its PEM files; ClientCA verifies its callers. Without
	// all three the port is not opened. They are read at the start.
	TLSCert, TLSKey, ClientCA string

	// Version of knoc, shown in the node's kubelet version.
	Version string
	// Logger gets the log; nil is slog.Default().
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field *string
		value string
	}{{&c.NodeName, "knoc"}, {&c.OS, "linux"}, {&c.Listen, ":10250"}} {
		if *d.field == "" {
			*d.field = d.value
		}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.SSH.Logger == nil {
		c.SSH.Logger = c.Logger
	}
	if c.UsageInterval == 0 {
		c.UsageInterval = 15 * time.Second
	}
	return c
}

// The cluster id is part of a path on the HPC side.
var clusterIDPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

// engine is what Run needs of the provider: virtual-kubelet's two interfaces,
// the kubelet's verbs, and the loop.
type engine interface {
	node.PodLifecycleHandler
	node.PodNotifier
	GetContainerLogs(ctx context.Context, namespace, pod, container string, opts api.ContainerLogOpts) (io.ReadCloser, error)
	RunInContainer(ctx context.Context, namespace, pod, container string, cmd []string, attach api.AttachIO) error
	AttachToContainer(ctx context.Context, namespace, pod, container string, attach api.AttachIO) error
	PortForward(ctx context.Context, namespace, pod string, port int32, stream io.ReadWriteCloser) error
	GetStatsSummary(ctx context.Context) (*statsv1alpha1.Summary, error)
	GetMetricsResource(ctx context.Context) ([]*dto.MetricFamily, error)

	run(ctx context.Context) error
	adopted() <-chan struct{}
	kick()
	nodeState() nodeState
	onNodeChange(func())
}

var _ engine = (*KNOCProvider)(nil)

// Run is knoc, from start to end: it returns nil when ctx is done, and an error
// of one line when it cannot start or cannot go on. It refuses bad input before
// it has made anything, here or on either cluster.
func Run(ctx context.Context, cfg Config) error {
	cfg = cfg.withDefaults()
	nodeConfig, err := loadNodeConfig(cfg.ProviderConfig, cfg.NodeName)
	if err != nil {
		return err
	}
	n, err := newVirtualNode(cfg, nodeConfig)
	if err != nil {
		return err
	}
	if err := cfg.checkHostPaths(); err != nil {
		return err
	}
	if cfg.APIServerForPods != "" {
		if _, err := apiServerForPods(cfg.APIServerForPods); err != nil {
			return err
		}
	}
	files, err := newKubeletFiles(cfg)
	if err != nil {
		return err
	}
	kube, host, err := newClients(cfg.Kubeconfig, "knoc/"+cfg.Version)
	if err != nil {
		return err
	}

	// From here on the API server is asked, but nothing is changed in it.
	who, err := identity(ctx, kube.node)
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
		return fmt.Errorf("API server %s: %w", host, err)
	}
	if err := n.allowedTo(who); err != nil {
		return err
	}
	if err := n.adopt(ctx, kube.node, cfg.Logger); err != nil {
		return err
	}
	if cfg.ClusterID == "" {
		if cfg.ClusterID, err = findClusterID(ctx, kube.node); err != nil {
			return err
		}
	}
	if !clusterIDPattern.MatchString(cfg.ClusterID) {
		return fmt.Errorf("--cluster-id %q: only letters, digits, dot, dash and underscore may be in it", cfg.ClusterID)
	}
	broadcaster, recorder := newRecorder(ctx, kube.events, n.name)
	defer broadcaster.Shutdown()
	factory := podInformers(kube.pods, n.name)
	pods := &kubePods{kube.pods, factory.Core().V1().Pods().Lister(), n.name, recorder}
	if _, err := pods.List(ctx); err != nil {
		return err
	}
	p, err := newProvider(cfg, nodeConfig, kubeObjects{kube.pods, &serviceCache{}}, pods)
	if err != nil {
		return err
	}
	listener, err := n.listen(cfg, files, host)
	if err != nil {
		return err
	}
	if listener != nil {
		defer listener.Close()
	}
	own, err := listenMetrics(cfg)
	if err != nil {
		return err
	}
	if own != nil {
		defer own.Close()
		go func() {
			if err := serveHTTP(ctx, own, metricsHandler(p.metrics, p.ready, cfg.Pprof), cfg.Logger); err != nil {
				cfg.Logger.Error("knoc's own metrics are not served any more", "error", err)
			}
		}()
	}
	cfg.Logger.Info("knoc starts", "version", cfg.Version, "node", n.name, "cluster", cfg.ClusterID, "ssh", cfg.SSH.Address, "api", host)
	return serve(ctx, cfg.Logger, kube, factory, n, pods, p, listener, newCallers(files, kube.node, n.name, cfg.Logger))
}

// serve runs the parts until ctx is done or one of them ends.
func serve(ctx context.Context, logger *slog.Logger, kube clients, factory informers.SharedInformerFactory,
	n *virtualNode, pods *kubePods, p engine, listener net.Listener, who *callers) error {
	stopped := ctx
	g, ctx := errgroup.WithContext(log.WithLogger(ctx, vkLogger{logger}))

	n.state = p.nodeState
	p.onNodeChange(n.touch)
	nodes, err := nodeController(n, kube)
	if err != nil {
		return err
	}
	informer := factory.Core().V1().Pods()
	podController, err := podController(kube, informer, p)
	if err != nil {
		return err
	}
	if _, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { p.kick() },
		UpdateFunc: func(any, any) { p.kick() },
		DeleteFunc: func(any) { p.kick() },
	}); err != nil {
		return fmt.Errorf("pod informer: %w", err)
	}
	own, err := watchOwnNode(kube, n)
	if err != nil {
		return err
	}
	for _, f := range []informers.SharedInformerFactory{factory, own} {
		f.Start(ctx.Done())
		defer f.Shutdown()
	}

	start := func(what string, f func(context.Context) error) {
		g.Go(func() error {
			err := f(ctx)
			if err == nil && ctx.Err() == nil {
				err = errors.New("ended by itself")
			}
			if err != nil {
				err = fmt.Errorf("%s: %w", what, err)
			}
			return err
		})
	}
	start("loop", p.run)
	start("node "+n.name, nodes.Run)
	start("pods", func(ctx context.Context) error {
		// virtual-kubelet creates what the provider does not know and deletes what
		// the lister does not know, so both must know everything first.
		if !cache.WaitForCacheSync(ctx.Done(), informer.Informer().HasSynced) {
			return ctx.Err()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.adopted():
		}
		logger.Info("serving pods", "node", n.name, "pods", len(pods.Pods()))
		return podController.Run(ctx, 8)
	})
	if listener != nil {
		start("kubelet port", func(ctx context.Context) error {
			return serveHTTP(ctx, listener, who.only(kubeletHandler(p, pods)), logger)
		})
	}
	err = g.Wait()
	if stopped.Err() != nil {
		return nil
	}
	return err
}

// nodeController keeps the Node object and its lease. It starts at once: a node
// that does not answer for its pods loses them, SSH or no SSH.
func nodeController(n *virtualNode, kube clients) (*node.NodeController, error) {
	c, err := node.NewNodeController(n, n.object(), kube.node.CoreV1().Nodes(),
		node.WithNodeEnableLeaseV1(kube.node.CoordinationV1().Leases(v1.NamespaceNodeLease), node.DefaultLeaseDuration),
		node.WithNodeStatusUpdateErrorHandler(n.recreate(kube.node)))
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", n.name, err)
	}
	return c, nil
}

// watchOwnNode updates the Node at once when somebody deletes it, which makes it
// again: the pod garbage collector waits 40 s before it takes the pods of a
// node that is gone, virtual-kubelet looks once a minute.
func watchOwnNode(kube clients, n *virtualNode) (informers.SharedInformerFactory, error) {
	f := informers.NewSharedInformerFactoryWithOptions(kube.pods, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, n.name).String()
	}))
	_, err := f.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		DeleteFunc: func(any) { n.touch() },
	})
	return f, err
}

// podController is virtual-kubelet's, with less power than it likes: see
// statusClient, and the provider, whose methods only mark and kick.
func podController(kube clients, pods corev1informers.PodInformer, p engine) (*node.PodController, error) {
	// It insists on informers for these, and would use them for the environment,
	// which is knoc's own (env.go). Nobody starts this factory, so nothing is
	// listed and no right to list is needed.
	unused := informers.NewSharedInformerFactory(kube.pods, 0).Core().V1()
	// Its queues let 10 keys through a second and give a key up after 20 tries.
	// The client's limit is enough, and a status that is given up is never sent.
	limiter := func() workqueue.TypedRateLimiter[any] {
		return workqueue.NewTypedItemExponentialFailureRateLimiter[any](time.Millisecond, time.Minute)
	}
	forever := func(context.Context, string, int, time.Time, error) (*time.Duration, error) { return nil, nil }
	c, err := node.NewPodController(node.PodControllerConfig{
		PodClient:                 statusClient{kube.pods.CoreV1(), pods.Lister()},
		PodInformer:               pods,
		EventRecorder:             noEvents{},
		Provider:                  p,
		ConfigMapInformer:         unused.ConfigMaps(),
		SecretInformer:            unused.Secrets(),
		ServiceInformer:           unused.Services(),
		SkipDownwardAPIResolution: true,

		SyncPodsFromKubernetesRateLimiter:        limiter(),
		DeletePodsFromKubernetesRateLimiter:      limiter(),
		SyncPodStatusFromProviderRateLimiter:     limiter(),
		SyncPodsFromKubernetesShouldRetryFunc:    forever,
		DeletePodsFromKubernetesShouldRetryFunc:  forever,
		SyncPodStatusFromProviderShouldRetryFunc: forever,
	})
	if err != nil {
		return nil, fmt.Errorf("pod controller: %w", err)
	}
	return c, nil
}

// streamTimeout is how long exec, attach and port-forward may be silent: the
// kubelet's own --streaming-connection-idle-timeout.
const streamTimeout = 4 * time.Hour

// kubeletHandler answers what the API server asks a kubelet.
func kubeletHandler(p engine, pods *kubePods) http.Handler {
	mux := http.NewServeMux()
	api.AttachPodRoutes(api.PodHandlerConfig{
		GetContainerLogs:      p.GetContainerLogs,
		RunInContainer:        p.RunInContainer,
		AttachToContainer:     p.AttachToContainer,
		PortForward:           p.PortForward,
		GetStatsSummary:       p.GetStatsSummary,
		GetMetricsResource:    p.GetMetricsResource,
		GetPods:               p.GetPods,
		GetPodsFromKubernetes: func(context.Context) ([]*v1.Pod, error) { return pods.Pods(), nil },
		// virtual-kubelet swaps the two for port-forward, so they must be alike.
		StreamIdleTimeout:     streamTimeout,
		StreamCreationTimeout: streamTimeout,
	}, mux, true)
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	return withTailNone(mux)
}
