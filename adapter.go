package knoc

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/remotecommand"
)

// Classic is the provider in virtual-kubelet's old form. One Go type cannot have
// both forms of GetContainerLogs.
func (p *KNOCProvider) Classic() Provider { return adapter{p} }

// adapter is KNOCProvider with the methods of old in place of new ones.
type adapter struct{ *KNOCProvider }

// GetContainerLogs implements Provider.
func (c adapter) GetContainerLogs(ctx context.Context, namespace, podName, containerName string, tail int) (string, error) {
	r, err := c.KNOCProvider.GetContainerLogs(ctx, namespace, podName, containerName, api.ContainerLogOpts{Tail: max(0, tail)})
	if err != nil {
		return "", err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	return string(b), err
}

// ExecInContainer implements Provider. The name is namespace/name, or the two
// joined by a dash, as virtual-kubelet joined them; a UID is preferred to it.
// A timeout of 0 is none.
func (c adapter) ExecInContainer(name string, uid types.UID, container string, cmd []string, in io.Reader, out, errOut io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize, timeout time.Duration) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if timeout > 0 {
		ctx, cancel = context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no end within %v", timeout))
		defer cancel()
	}
	pods, err := c.GetPods(ctx)
	if err != nil {
		return err
	}
	var found *v1.Pod
	for _, pod := range pods {
		if uid != "" && pod.UID != uid {
			continue
		}
		if uid == "" && name != pod.Namespace+"/"+pod.Name && name != pod.Namespace+"-"+pod.Name {
			continue
		}
		if found != nil {
			return errdefs.InvalidInputf("pod name %q means both %s/%s and %s/%s: give the UID", name, found.Namespace, found.Name, pod.Namespace, pod.Name)
		}
		found = pod
	}
	if found == nil {
		return errdefs.NotFoundf("pod %q with uid %q is not known to the provider", name, uid)
	}
	a := &classicIO{in: in, out: out, err: errOut, tty: tty, resize: make(chan api.TermSize)}
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case s, ok := <-resize:
				if !ok {
					return
				}
				select {
				case a.resize <- api.TermSize{Width: s.Width, Height: s.Height}:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	return c.RunInContainer(ctx, found.Namespace, found.Name, container, cmd, a)
}

type classicIO struct {
	in       io.Reader
	out, err io.WriteCloser
	tty      bool
	resize   chan api.TermSize
}

func (a *classicIO) Stdin() io.Reader            { return a.in }
func (a *classicIO) Stdout() io.WriteCloser      { return a.out }
func (a *classicIO) Stderr() io.WriteCloser      { return a.err }
func (a *classicIO) TTY() bool                   { return a.tty }
func (a *classicIO) Resize() <-chan api.TermSize { return a.resize }

// Capacity implements Provider: what the provider config sets, for the rest
// what Slurm has.
func (c adapter) Capacity(context.Context) v1.ResourceList { return c.capacity() }

// NodeConditions implements Provider.
func (c adapter) NodeConditions(context.Context) []v1.NodeCondition {
	return nodeConditions(c.nodeState(), nil, metav1.Now())
}

// NodeAddresses implements Provider.
func (c adapter) NodeAddresses(context.Context) []v1.NodeAddress { return c.addresses() }

// NodeDaemonEndpoints implements Provider.
func (c adapter) NodeDaemonEndpoints(context.Context) *v1.NodeDaemonEndpoints {
	return c.endpoints()
}

// OperatingSystem implements Provider.
func (c adapter) OperatingSystem() string { return c.operatingSystem() }

// Ping implements NodeProvider. It never fails, for an outage would cost pods
// whose jobs do not even notice it: see NodeConditions.
func (c adapter) Ping(context.Context) error { return nil }

// NotifyNodeStatus implements NodeProvider: cb gets the node whenever Slurm has
// changed, or cannot be reached.
func (c adapter) NotifyNodeStatus(ctx context.Context, cb func(*v1.Node)) {
	changed := make(chan struct{}, 1)
	c.onNodeChange(func() { poke(changed) })
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-changed:
				n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.cfg.NodeName}}
				c.ConfigureNode(ctx, n)
				cb(n)
			}
		}
	}()
}

// operatingSystem is the name as it was given to NewProvider, or Linux.
func (p *KNOCProvider) operatingSystem() string {
	if strings.EqualFold(p.cfg.OS, OperatingSystemLinux) || p.cfg.OS == "" {
		return OperatingSystemLinux
	}
	return p.cfg.OS
}
