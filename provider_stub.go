// Stand-ins until exec.go, logs.go, stats.go and classic.go land.

package knoc

import (
	"context"
	"errors"
	"io"

	dto "github.com/prometheus/client_model/go"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	statsv1alpha1 "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

type usage struct{}
type lazyLoop struct{}

func (p *KNOCProvider) begin() {}

func (p *KNOCProvider) GetContainerLogs(ctx context.Context, namespace, pod, container string, opts api.ContainerLogOpts) (io.ReadCloser, error) {
	return nil, errors.New("not supported yet")
}
func (p *KNOCProvider) RunInContainer(ctx context.Context, namespace, pod, container string, cmd []string, attach api.AttachIO) error {
	return errors.New("not supported yet")
}
func (p *KNOCProvider) GetStatsSummary(ctx context.Context) (*statsv1alpha1.Summary, error) {
	return nil, errors.New("not supported yet")
}
func (p *KNOCProvider) AttachToContainer(ctx context.Context, namespace, pod, container string, attach api.AttachIO) error {
	return errors.New("not supported yet")
}
func (p *KNOCProvider) PortForward(ctx context.Context, namespace, pod string, port int32, stream io.ReadWriteCloser) error {
	return errors.New("not supported yet")
}
func (p *KNOCProvider) GetMetricsResource(ctx context.Context) ([]*dto.MetricFamily, error) {
	return nil, errors.New("not supported yet")
}
