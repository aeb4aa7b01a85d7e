package knoc

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// hostVolume is a volume that is there already: a directory or a file that the
// compute nodes have, for a hostPath, nfs or claimed volume. run/places.sh goes to
// it when the job starts and before each container.
type hostVolume struct {
	Volume string
	// Base is the directory that the administrator allows, Path the path below it.
	Base, Path string
	// Shown is the whole path as the pod's author knows it.
	Shown string
	// Type is a hostPath's, "any" for none; "Directory" for others.
	Type     string
	ReadOnly bool
}

// isHost says whether the volume is there already.
func isHost(v *v1.Volume) bool {
	return v != nil && (v.HostPath != nil || v.NFS != nil || v.PersistentVolumeClaim != nil)
}

func isMounted(pod *v1.Pod, volume string) bool {
	return slices.ContainsFunc(allContainers(pod), func(c *v1.Container) bool {
		return slices.ContainsFunc(c.VolumeMounts, func(m v1.VolumeMount) bool { return m.Name == volume })
	})
}

// claims is where claims and what they are bound to come from. A node identity
// may read those of its own pods, by name.
type claims interface {
	Claim(ctx context.Context, namespace, name string) (*v1.PersistentVolumeClaim, error)
	PersistentVolume(ctx context.Context, name string) (*v1.PersistentVolume, error)
}

var _ claims = kubeObjects{}

func (k kubeObjects) Claim(ctx context.Context, namespace, name string) (*v1.PersistentVolumeClaim, error) {
	return k.client.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, name, metav1.GetOptions{})
}

func (k kubeObjects) PersistentVolume(ctx context.Context, name string) (*v1.PersistentVolume, error) {
	return k.client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
}

// hostVolumes finds out which paths of the compute nodes a pod's volumes are. The
// error is a *refusal, a *notYet or the context's, as stageVolumes'.
func hostVolumes(ctx context.Context, pod *v1.Pod, objs objects, cfg Config) ([]hostVolume, error) {
	var list []hostVolume
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if !isMounted(pod, v.Name) {
			continue // nor does a kubelet look for it
		}
		var h hostVolume
		var err error
		switch {
		case v.HostPath != nil:
			h, err = hostPath(v.HostPath, cfg.HostPaths)
		case v.NFS != nil:
			h, err = mapped(v.NFS.Server+":"+path.Clean("/"+v.NFS.Path), "the NFS directory", cfg.VolumePaths)
			h.ReadOnly = v.NFS.ReadOnly
		case v.PersistentVolumeClaim != nil:
			h, err = claimed(ctx, pod, v, objs, cfg)
		default:
			continue
		}
		var wait *notYet
		if errors.As(err, &wait) {
			return nil, err
		}
		if err != nil {
			return nil, mountError(ctx, v, err)
		}
		h.Volume = v.Name
		list = append(list, h)
	}
	return list, nil
}

// hostPath is where the administrator allows it.
func hostPath(s *v1.HostPathVolumeSource, allowed []string) (hostVolume, error) {
	h := hostVolume{Shown: path.Clean(s.Path), Type: "any"}
	if s.Type != nil && *s.Type != "" {
		h.Type = string(*s.Type)
	}
	at := longest(allowed, func(prefix string) bool { return isBelow(prefix, h.Shown) })
	if at < 0 {
		return h, refuse("UnsupportedVolume", "the hostPath %q is not below a directory that knoc's --host-path allows; ask the administrator for one, or use another volume", s.Path)
	}
	h.Base = path.Clean(allowed[at])
	h.Path = strings.TrimPrefix(strings.TrimPrefix(h.Shown, h.Base), "/")
	return h, nil
}

// mapped is the directory on the cluster of a path elsewhere, by --volume-path.
func mapped(from, what string, paths []string) (hostVolume, error) {
	at := longest(paths, func(m string) bool {
		prefix, _, _ := strings.Cut(m, "=")
		return isBelow(prefix, from)
	})
	if at < 0 {
		return hostVolume{}, refuse("UnsupportedVolume", "%s %q is below no path that knoc's --volume-path maps to a directory of the cluster; ask the administrator for one, or use another volume", what, from)
	}
	prefix, base, _ := strings.Cut(paths[at], "=")
	below := strings.TrimPrefix(strings.TrimPrefix(from, cleanPrefix(prefix)), "/")
	return hostVolume{Base: path.Clean(base), Path: below, Shown: path.Join(base, below), Type: string(v1.HostPathDirectory)}, nil
}

// longest is the index of the longest text that fits, -1 for none.
func longest(texts []string, fits func(string) bool) int {
	best := -1
	for i, s := range texts {
		if fits(s) && (best < 0 || len(s) > len(texts[best])) {
			best = i
		}
	}
	return best
}

// cleanPrefix is a path, or one of a server, in its one form.
func cleanPrefix(s string) string {
	server, dir, found := strings.Cut(s, ":/")
	if !found {
		return path.Clean(s)
	}
	return server + ":" + path.Clean("/"+dir)
}

// isBelow says whether the path is the prefix or below it.
func isBelow(prefix, name string) bool {
	prefix = cleanPrefix(prefix)
	return name == prefix || strings.HasPrefix(name, strings.TrimSuffix(prefix, "/")+"/")
}

// claimed is what a claim is bound to. The words are the kubelet's (getPVCExtractPV
// and getPVSpec in pkg/kubelet/volumemanager/populator).
func claimed(ctx context.Context, pod *v1.Pod, v *v1.Volume, objs objects, cfg Config) (hostVolume, error) {
	name := v.PersistentVolumeClaim.ClaimName
	wait := func(format string, args ...any) (hostVolume, error) {
		return hostVolume{}, waitFor("FailedMount", "Unable to attach or mount volumes: unmounted volumes=[%s], unattached volumes=[], failed to process volumes=[%s]: error processing PVC %s/%s: %s",
			v.Name, v.Name, pod.Namespace, name, fmt.Sprintf(format, args...))
	}
	source, ok := objs.(claims)
	if !ok {
		return hostVolume{}, refuse("UnsupportedVolume", "a classic ResourceManager knows no persistentVolumeClaims; run knoc itself")
	}
	claim, err := source.Claim(ctx, pod.Namespace, name)
	switch {
	case ctx.Err() != nil:
		return hostVolume{}, ctx.Err()
	case err != nil:
		return wait("failed to fetch PVC from API server: %v", err)
	case claim.DeletionTimestamp != nil:
		return wait("PVC is being deleted")
	case claim.Status.Phase != v1.ClaimBound:
		return wait("PVC is not bound")
	case claim.Spec.VolumeName == "":
		return wait("PVC has empty pvc.Spec.VolumeName")
	case claim.Spec.VolumeMode != nil && *claim.Spec.VolumeMode == v1.PersistentVolumeBlock:
		return hostVolume{}, refuse("UnsupportedVolume", "volume %s has volumeMode Block, but is specified in volumeMounts", v.Name)
	}
	pv, err := source.PersistentVolume(ctx, claim.Spec.VolumeName)
	switch {
	case ctx.Err() != nil:
		return hostVolume{}, ctx.Err()
	case err != nil:
		return wait("failed to fetch PV %s from API server: %v", claim.Spec.VolumeName, err)
	case pv.Spec.ClaimRef == nil:
		return wait("found PV object %s but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim", pv.Name)
	case pv.Spec.ClaimRef.UID != claim.UID:
		return wait("found PV object %s but its pv.Spec.ClaimRef.UID %s does not point to claim.UID %s", pv.Name, pv.Spec.ClaimRef.UID, claim.UID)
	}
	what := "the path of persistentVolume " + pv.Name + ","
	var h hostVolume
	switch s := pv.Spec.PersistentVolumeSource; {
	case s.HostPath != nil:
		h, err = mapped(path.Clean(s.HostPath.Path), what, cfg.VolumePaths)
		if t := s.HostPath.Type; t != nil && *t != "" && err == nil {
			h.Type = string(*t)
		}
	case s.Local != nil:
		h, err = mapped(path.Clean(s.Local.Path), what, cfg.VolumePaths)
	case s.NFS != nil:
		h, err = mapped(s.NFS.Server+":"+path.Clean("/"+s.NFS.Path), what, cfg.VolumePaths)
		h.ReadOnly = s.NFS.ReadOnly
	default:
		return h, refuse("UnsupportedVolume", "persistentVolume %s is of a kind that knoc cannot reach from the cluster; use a hostPath, local or nfs one", pv.Name)
	}
	h.ReadOnly = h.ReadOnly || v.PersistentVolumeClaim.ReadOnly
	return h, err
}

// allowedPaths are the directories of the compute nodes that pods may see.
func allowedPaths(c Config) []string {
	list := slices.Clone(c.HostPaths)
	for _, m := range c.VolumePaths {
		_, dir, _ := strings.Cut(m, "=")
		list = append(list, dir)
	}
	return list
}

// checkHostPaths checks the two flags that name directories of the cluster.
func (c Config) checkHostPaths() error {
	for _, p := range c.HostPaths {
		if !strings.HasPrefix(p, "/") || !plainText.MatchString(p) {
			return fmt.Errorf("--host-path %q: the absolute path of a directory on the cluster, of letters, digits and . _ / @ + ~ -", p)
		}
	}
	for _, m := range c.VolumePaths {
		from, to, found := strings.Cut(m, "=")
		if !found || !(strings.HasPrefix(from, "/") || strings.Contains(from, ":/")) || !strings.HasPrefix(to, "/") || !plainText.MatchString(to) {
			return fmt.Errorf("--volume-path %q: PATH=DIRECTORY or SERVER:/EXPORT=DIRECTORY, the directory an absolute path on the cluster", m)
		}
	}
	return nil
}

// hostTypes are the words of a hostPath's type.
var hostTypes = []v1.HostPathType{v1.HostPathUnset, v1.HostPathDirectoryOrCreate, v1.HostPathDirectory, v1.HostPathFileOrCreate, v1.HostPathFile, v1.HostPathSocket, v1.HostPathCharDev, v1.HostPathBlockDev}

// checkHostVolume refuses what the API server would.
func checkHostVolume(v *v1.Volume) error {
	bad := func(format string, args ...any) error { return refuse("InvalidPod", format, args...) }
	switch {
	case v.HostPath != nil:
		p := v.HostPath.Path
		if !path.IsAbs(p) || slices.Contains(strings.Split(p, "/"), "..") {
			return bad(`hostPath.path: %q: must be absolute, without ".."`, p)
		}
		if t := v.HostPath.Type; t != nil && !slices.Contains(hostTypes, *t) {
			return bad("hostPath.type: %q is an invalid volume type", *t)
		}
	case v.NFS != nil:
		if v.NFS.Server == "" || !path.IsAbs(v.NFS.Path) || slices.Contains(strings.Split(v.NFS.Path, "/"), "..") {
			return bad(`nfs: %q: needs a server and an absolute path without ".."`, v.NFS.Server+":"+v.NFS.Path)
		}
	case v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == "":
		return bad("persistentVolumeClaim has no claimName")
	}
	return nil
}
