// Stand-ins until provider.go, ssh.go and exec.go land.

package knoc

import (
	"context"
	"errors"
	"io"

	dto "github.com/prometheus/client_model/go"
	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	v1 "k8s.io/api/core/v1"
	statsv1alpha1 "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

// AnnotationJobID is the pod annotation with the id of the pod's Slurm job.
const AnnotationJobID = "slurm-job.knoc.io/job-id"

type nodeState struct {
	Resources nodeResources
	Known     bool
	Problem   string
}

type KNOCProvider struct{ done chan struct{} }

func newProvider(cfg Config, node NodeConfig, objs objects, api podAPI) (*KNOCProvider, error) {
	p := &KNOCProvider{make(chan struct{})}
	close(p.done)
	return p, nil
}
func (p *KNOCProvider) run(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
func (p *KNOCProvider) adopted() <-chan struct{}      { return p.done }
func (p *KNOCProvider) kick()                         {}
func (p *KNOCProvider) nodeState() nodeState          { return nodeState{} }
func (p *KNOCProvider) onNodeChange(func())           {}

func (p *KNOCProvider) CreatePod(context.Context, *v1.Pod) error { return nil }
func (p *KNOCProvider) UpdatePod(context.Context, *v1.Pod) error { return nil }
func (p *KNOCProvider) DeletePod(context.Context, *v1.Pod) error { return nil }
func (p *KNOCProvider) GetPod(context.Context, string, string) (*v1.Pod, error) {
	return nil, errdefs.NotFound("stub")
}
func (p *KNOCProvider) GetPodStatus(context.Context, string, string) (*v1.PodStatus, error) {
	return nil, errdefs.NotFound("stub")
}
func (p *KNOCProvider) GetPods(context.Context) ([]*v1.Pod, error) { return nil, nil }
func (p *KNOCProvider) NotifyPods(context.Context, func(*v1.Pod))  {}
func (p *KNOCProvider) GetContainerLogs(ctx context.Context, namespace, pod, container string, opts api.ContainerLogOpts) (io.ReadCloser, error) {
	return nil, errors.New("stub")
}
func (p *KNOCProvider) RunInContainer(ctx context.Context, namespace, pod, container string, cmd []string, attach api.AttachIO) error {
	return errors.New("stub")
}
func (p *KNOCProvider) GetStatsSummary(ctx context.Context) (*statsv1alpha1.Summary, error) {
	return nil, errors.New("stub")
}

func (p *KNOCProvider) AttachToContainer(ctx context.Context, namespace, pod, container string, attach api.AttachIO) error {
	return errors.New("stub")
}
func (p *KNOCProvider) PortForward(ctx context.Context, namespace, pod string, port int32, stream io.ReadWriteCloser) error {
	return errors.New("stub")
}
func (p *KNOCProvider) GetMetricsResource(ctx context.Context) ([]*dto.MetricFamily, error) {
	return nil, errors.New("stub")
}
