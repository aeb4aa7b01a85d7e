package knoc

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// place is a mount of which only the compute node can tell where it is, right
// before the container starts: a path within a volume, where containers may have
// put links by then. run/places.sh finds it and leaves it at run/pod.places/<n>.<i>.
type place struct {
	Index  int
	Volume string
	// Path is the path in the volume as a shell word, which may refer to the
	// container's variables.
	Path word
	// Needs are those variables; each one must have a value.
	Needs []need
	// Within is a directory of the container's mounts that this mount lies in, and
	// Below the path there, "" for none. Where a directory or a file is needed there
	// to mount on, it is made. Alone says that there is nothing else to do.
	Within, Below word
	Alone         bool
}

// need is a variable of the container, and the word of its value.
type need struct {
	Name  string
	Value word
}

// isPlace says whether only the compute node can tell where the mount is.
func isPlace(pod *v1.Pod, m *v1.VolumeMount) bool {
	return m.SubPath != "" || m.SubPathExpr != "" || isHost(volumeOf(pod, m.Name))
}

// placeDir is where run/places.sh leaves what it found, in the pod's directory.
const placeDir = "run/pod.places"

// placesOf are the places among a container's mounts.
func placesOf(pod *v1.Pod, c *v1.Container, prefix string) ([]place, error) {
	mounts, err := mountsOf(pod, c)
	if err != nil {
		return nil, err
	}
	var places []place
	for i := range mounts {
		m := &mounts[i]
		if m.Mount == nil {
			continue
		}
		p := place{Index: i, Volume: m.Mount.Name, Alone: !isPlace(pod, m.Mount)}
		if m.Mount.SubPathExpr == "" {
			p.Path = quote(m.Mount.SubPath)
		} else {
			p.Path, p.Needs = argument(m.Mount.SubPathExpr, prefix), needsOf(m.Mount.SubPathExpr, prefix)
		}
		if holder := holderOf(mounts, m.Target); holder != nil && (isPlace(pod, m.Mount) || isPlace(pod, holder.Mount)) {
			p.Below = quote(strings.TrimPrefix(m.Target, holder.Target+"/"))
			p.Within = word(`"$volumes/` + holder.Mount.Name + `"`)
			if isPlace(pod, holder.Mount) {
				p.Within = word(fmt.Sprintf("%s/%d.%d", placeDir, numberOf(pod, c), slices.IndexFunc(mounts, func(o mount) bool { return o.Target == holder.Target })))
			}
		}
		if !p.Alone || p.Below != "" {
			places = append(places, p)
		}
	}
	return places, nil
}

// needsOf are the variables that a subPathExpr refers to, in their order by name.
func needsOf(text, prefix string) []need {
	var needs []need
	expand(text, func(name string) ([]valuePart, bool) {
		n := need{name, quote("")}
		if refName.MatchString(name) {
			n.Value = word(fmt.Sprintf(`"${%s-}"`, shellVar(name, prefix)))
		}
		if !slices.Contains(needs, n) {
			needs = append(needs, n)
		}
		return nil, false
	})
	slices.SortFunc(needs, func(a, b need) int { return cmp.Compare(a.Name, b.Name) })
	return needs
}

// holderOf is the volume's mount that holds the mount point: that of the longest
// path above it; nil for none.
func holderOf(mounts []mount, target string) (holder *mount) {
	for i := range mounts {
		m := &mounts[i]
		if m.Mount != nil && strings.HasPrefix(target, m.Target+"/") && (holder == nil || len(m.Target) > len(holder.Target)) {
			holder = m
		}
	}
	return holder
}

func volumeOf(pod *v1.Pod, name string) *v1.Volume {
	at := slices.IndexFunc(pod.Spec.Volumes, func(v v1.Volume) bool { return v.Name == name })
	if at < 0 {
		return nil
	}
	return &pod.Spec.Volumes[at]
}

// checkSubPath refuses what the API server would: a path that is absolute or goes
// up. What an expression becomes is checked by run/places.sh.
func checkSubPath(m *v1.VolumeMount) error {
	text := cmp.Or(m.SubPath, m.SubPathExpr)
	switch {
	case m.SubPath != "" && m.SubPathExpr != "":
		return fmt.Errorf("has both a subPath and a subPathExpr")
	case path.IsAbs(text):
		return fmt.Errorf("has the absolute path %q in its volume; write it relative to the volume", text)
	case slices.Contains(strings.Split(text, "/"), ".."):
		return fmt.Errorf(`has the path %q in its volume, which must not contain ".."`, text)
	}
	return nil
}

// needsRoom says whether a container must find its places where nobody can replace
// them: whether they are in volumes that containers write to.
func needsRoom(pod *v1.Pod, c *v1.Container) bool {
	return slices.ContainsFunc(c.VolumeMounts, func(m v1.VolumeMount) bool {
		return isPlace(pod, &m) && !isProjection(volumeOf(pod, m.Name))
	})
}

// placeWords are the words before the runtime: into the container's room and
// through run/places.sh, which has no variables of the container's as its own
// ($carry comes after it). In a mapped pod the volumes are on the node's scratch.
func placeWords(pod *v1.Pod, c *v1.Container) []word {
	volumes, room := word("vol"), word(`''`)
	if isMapped(pod) {
		volumes = `"$scratch/.vol"`
	}
	words := []word{"sh", "run/places.sh", word(fmt.Sprint(numberOf(pod, c))), volumes, room, "$carry"}
	if needsRoom(pod, c) {
		words[4] = `"$room"`
		words = append([]word{"$room"}, words...)
	}
	return words
}

// numberOf is the container's number in pod.sh.
func numberOf(pod *v1.Pod, c *v1.Container) int {
	return 1 + slices.IndexFunc(allContainers(pod), func(o *v1.Container) bool { return o.Name == c.Name })
}
