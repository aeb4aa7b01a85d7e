package knoc

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// AnnotationScratchVolumes is the pod annotation with the names of emptyDirs, with
// commas between them or "*" for all, that lie on the compute node's scratch.
const AnnotationScratchVolumes = "slurm-job.knoc.io/scratch-volumes"

// nodeDir is an emptyDir that pod.sh makes on its compute node.
type nodeDir struct {
	Volume string
	Root   word   // of the pod's directory there
	Below  []word // directories that containers mount something on, in it
	Memory bool
}

// sizeLimit is how large an emptyDir may become.
type sizeLimit struct {
	Volume string
	KiB    int64
}

// scratchVolumes are the names in the annotation.
func scratchVolumes(pod *v1.Pod) []string {
	return strings.FieldsFunc(pod.Annotations[AnnotationScratchVolumes], func(r rune) bool { return r == ',' || r == ' ' })
}

func inMemory(v *v1.Volume) bool {
	return v.EmptyDir != nil && v.EmptyDir.Medium == v1.StorageMediumMemory
}

// isOnNode says whether the volume is an emptyDir that is not in the pod's
// directory on the cluster. In a mapped pod only those in memory are apart: all
// others are on the node's scratch.
func isOnNode(pod *v1.Pod, v *v1.Volume) bool {
	list := scratchVolumes(pod)
	return inMemory(v) || isEmptyDir(v) && !isMapped(pod) && (slices.Contains(list, v.Name) || slices.Contains(list, "*"))
}

// nodeDirs are the pod's emptyDirs on its node.
func nodeDirs(pod *v1.Pod) []nodeDir {
	var list []nodeDir
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if !isOnNode(pod, v) {
			continue
		}
		d := nodeDir{Volume: v.Name, Root: `"$scratch/.vol"`, Memory: inMemory(v)}
		if d.Memory {
			d.Root = `"$shm"`
		}
		for _, f := range nestedMountpoints(pod, v, nil) {
			d.Below = append(d.Below, d.Root+"/"+quote(strings.TrimPrefix(f.Name, "vol/")))
		}
		list = append(list, d)
	}
	return list
}

// sizeLimits are those of the pod's emptyDirs; 0 is none, as for a kubelet.
func sizeLimits(pod *v1.Pod) []sizeLimit {
	var list []sizeLimit
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.EmptyDir != nil && v.EmptyDir.SizeLimit != nil && v.EmptyDir.SizeLimit.Sign() == 1 {
			list = append(list, sizeLimit{v.Name, v.EmptyDir.SizeLimit.Value() / 1024})
		}
	}
	return list
}

// evicted is the kubelet's sentence about an emptyDir that has become too large
// (emptyDirMessageFmt in pkg/kubelet/eviction).
func evicted(pod *v1.Pod, volume string) string {
	limit := "?"
	if v := volumeOf(pod, volume); v != nil && v.EmptyDir != nil && v.EmptyDir.SizeLimit != nil {
		limit = v.EmptyDir.SizeLimit.String()
	}
	return fmt.Sprintf("Usage of EmptyDir volume %q exceeds the limit %q. ", volume, limit)
}

// checkScratchVolumes refuses names of the annotation that are no emptyDir's.
func (k *checker) checkScratchVolumes(pod *v1.Pod) {
	for _, name := range scratchVolumes(pod) {
		if v := volumeOf(pod, name); name != "*" && (v == nil || !isEmptyDir(v)) {
			k.refuse("InvalidPod", "annotation %s: %q: the pod has no emptyDir of that name", AnnotationScratchVolumes, name)
		}
	}
}
