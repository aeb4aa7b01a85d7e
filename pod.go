package knoc

import (
	"context"
	"io/fs"
	"time"

	v1 "k8s.io/api/core/v1"
)

// file is one entry of the tar that stages a pod: a path relative to the pod's
// directory on the cluster. Link makes it a symbolic link, a Mode with
// fs.ModeDir a directory.
type file struct {
	Name string
	Mode fs.FileMode
	Body []byte
	Link string
}

// mount binds something of the pod's directory into a container.
type mount struct {
	// Source is a path relative to the pod's directory, such as "vol/data".
	Source string
	// Target is the mount path in the container.
	Target   string
	ReadOnly bool
	// Mount is the volume's mount that this is, nil for knoc's own.
	Mount *v1.VolumeMount
}

// objects is where the things a pod names come from: the API server (kube.go),
// or the ResourceManager of a fork (classic.go). A missing object is an error
// for which apierrors.IsNotFound holds.
type objects interface {
	ConfigMap(ctx context.Context, namespace, name string) (*v1.ConfigMap, error)
	Secret(ctx context.Context, namespace, name string) (*v1.Secret, error)
	// Services are those of a namespace, or the one of that name; "" is all.
	Services(ctx context.Context, namespace, name string) ([]v1.Service, error)
	// Token asks for a token of the pod's service account (TokenRequest API),
	// bound to the pod, for the audience ("" is the API server's own) and the
	// lifetime in seconds; and says when to renew it.
	Token(ctx context.Context, pod *v1.Pod, audience string, seconds int64) (token string, renew time.Time, err error)
}

// podAPI is the loop's view of this node's pods in the API server.
type podAPI interface {
	// Pods are the informer's copies, by spec.nodeName: read-only.
	Pods() []*v1.Pod
	// List asks the API server itself (spec.nodeName=<node>, resourceVersion "").
	List(ctx context.Context) ([]*v1.Pod, error)
	// Delete removes the object with grace period 0 and a UID precondition. An
	// object that is gone, or has another UID, is no error.
	Delete(ctx context.Context, pod *v1.Pod) error
	// Event writes an event about a container of the pod, "" for the pod;
	// eventtype is v1.EventTypeNormal or v1.EventTypeWarning.
	Event(pod *v1.Pod, container, eventtype, reason, message string)
}
