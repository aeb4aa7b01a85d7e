package knoc

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// tokenSeconds is the lifetime of a projected token that names none: the
// default that the API server gives expirationSeconds.
const tokenSeconds = 3600

// projected is one file of a configMap, secret, downwardAPI or projected volume.
type projected struct {
	Mode  fs.FileMode
	Body  []byte
	Token bool // Body is a token
}

// payload are the files of such a volume by their path in it.
type payload map[string]projected

// stageVolumes makes the files of all volumes of the pod, under vol/<volume>/.
// An emptyDir is a directory. The others have the kubelet's layout
// (pkg/volume/util/atomic_writer.go), so that a later version can replace all
// files at once by renaming one link:
//
//	vol/config/..0123456789abcdef/key   the bytes
//	vol/config/..data                   → ..0123456789abcdef
//	vol/config/key                      → ..data/key
//
// The kubelet names the directory after the time; here it is a hash of what is
// in it, so that staging the same again gives the same. Files have the modes
// that were asked for; directories are 0700, since everything belongs to the
// one user that also runs the containers.
//
// The error is a *refusal for what can never work, a *notYet for what may, or
// the context's. With the files comes what was sent of each volume.
func stageVolumes(ctx context.Context, pod *v1.Pod, objs objects, node nodeFacts) ([]file, map[string]sentVolume, error) {
	var files []file
	sent := map[string]sentVolume{}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if isHost(v) || isOnNode(pod, v) {
			continue // it is there, or pod.sh makes it
		}
		dir := "vol/" + v.Name
		files = append(files, file{Name: dir, Mode: fs.ModeDir | 0o700})
		var p payload
		if !isEmptyDir(v) {
			var err error
			times := &tokenTimes{objects: objs}
			if p, err = volumePayload(ctx, pod, v, times, node); err != nil {
				return nil, nil, mountError(ctx, v, err)
			}
			staged, err := stagePayload(dir, p)
			if err != nil {
				return nil, nil, mountError(ctx, v, err)
			}
			sent[v.Name] = times.sent(p)
			files = append(files, staged...)
		}
		files = append(files, nestedMountpoints(pod, v, p)...)
	}
	return files, sent, nil
}

// isEmptyDir says whether the volume is one; a volume without a source is, by
// the API server's default (SetDefaults_Volume).
func isEmptyDir(v *v1.Volume) bool {
	return v.EmptyDir != nil || v.VolumeSource == v1.VolumeSource{}
}

// isProjection says whether the volume is a projection of objects, which the
// kubelet mounts read-only whatever the mount says.
func isProjection(v *v1.Volume) bool {
	return v.ConfigMap != nil || v.Secret != nil || v.Projected != nil || v.DownwardAPI != nil
}

// mountError says in the kubelet's words which volume cannot be set up.
func mountError(ctx context.Context, v *v1.Volume, err error) error {
	var refused *refusal
	if errors.As(err, &refused) {
		return refuse(refused.Reason, "volume %s: %s", v.Name, refused.Message)
	}
	return notYetFor(ctx, "FailedMount", fmt.Sprintf("MountVolume.SetUp failed for volume %q : ", v.Name), "", "", err)
}

// volumePayload reads what a volume projects.
func volumePayload(ctx context.Context, pod *v1.Pod, v *v1.Volume, objs objects, node nodeFacts) (payload, error) {
	p := payload{}
	switch {
	case v.ConfigMap != nil:
		s := v.ConfigMap
		return p, p.configMap(ctx, pod, objs, s.Name, s.Items, s.DefaultMode, isTrue(s.Optional))
	case v.Secret != nil:
		s := v.Secret
		return p, p.secret(ctx, pod, objs, s.SecretName, s.Items, s.DefaultMode, isTrue(s.Optional))
	case v.DownwardAPI != nil:
		return p, p.downwardAPI(pod, v.DownwardAPI.Items, v.DownwardAPI.DefaultMode, node)
	case v.Projected == nil:
		return nil, refuse("UnsupportedVolume", "its kind is not supported")
	}
	// Later sources win where paths meet, as in the kubelet (pkg/volume/projected).
	mode := v.Projected.DefaultMode
	for i := range v.Projected.Sources {
		var err error
		switch s := &v.Projected.Sources[i]; {
		case s.ConfigMap != nil:
			err = p.configMap(ctx, pod, objs, s.ConfigMap.Name, s.ConfigMap.Items, mode, isTrue(s.ConfigMap.Optional))
		case s.Secret != nil:
			err = p.secret(ctx, pod, objs, s.Secret.Name, s.Secret.Items, mode, isTrue(s.Secret.Optional))
		case s.DownwardAPI != nil:
			err = p.downwardAPI(pod, s.DownwardAPI.Items, mode, node)
		case s.ServiceAccountToken != nil:
			err = p.token(ctx, pod, objs, s.ServiceAccountToken, mode)
		default:
			err = refuse("UnsupportedVolume", "the kind of projected source %d is not supported", i)
		}
		if err != nil {
			return nil, err
		}
	}
	return p, nil
}

// add puts one file at a path below the volume.
func (p payload) add(name string, body []byte, mode, defaultMode *int32) error {
	if err := checkVolumePath(name); err != nil {
		return err
	}
	perm := int32(v1.ConfigMapVolumeSourceDefaultMode) // 0644, that of the other kinds too
	switch {
	case mode != nil:
		perm = *mode
	case defaultMode != nil:
		perm = *defaultMode
	}
	p[path.Clean(name)] = projected{Mode: fs.FileMode(perm) & fs.ModePerm, Body: body}
	return nil
}

// keys adds all of data, or what items pick from it.
func (p payload) keys(data map[string][]byte, items []v1.KeyToPath, defaultMode *int32, optional bool, missing string) error {
	if len(items) == 0 {
		for _, key := range slices.Sorted(maps.Keys(data)) {
			if err := p.add(key, data[key], nil, defaultMode); err != nil {
				return err
			}
		}
		return nil
	}
	for i := range items {
		body, ok := data[items[i].Key]
		if !ok {
			if optional {
				continue
			}
			return fmt.Errorf("%s: %s", missing, items[i].Key)
		}
		if err := p.add(items[i].Path, body, items[i].Mode, defaultMode); err != nil {
			return err
		}
	}
	return nil
}

func (p payload) configMap(ctx context.Context, pod *v1.Pod, objs objects, name string, items []v1.KeyToPath, mode *int32, optional bool) error {
	cm, err := objs.ConfigMap(ctx, pod.Namespace, name)
	switch {
	case apierrors.IsNotFound(err) && optional:
		return nil
	case apierrors.IsNotFound(err):
		return fmt.Errorf("configmap %q not found", name)
	case err != nil:
		return err
	}
	data := map[string][]byte{}
	maps.Copy(data, cm.BinaryData)
	for k, v := range cm.Data {
		data[k] = []byte(v)
	}
	return p.keys(data, items, mode, optional, "configmap references non-existent config key")
}

func (p payload) secret(ctx context.Context, pod *v1.Pod, objs objects, name string, items []v1.KeyToPath, mode *int32, optional bool) error {
	s, err := objs.Secret(ctx, pod.Namespace, name)
	switch {
	case apierrors.IsNotFound(err) && optional:
		return nil
	case apierrors.IsNotFound(err):
		return fmt.Errorf("secret %q not found", name)
	case err != nil:
		return err
	}
	return p.keys(s.Data, items, mode, optional, "references non-existent secret key")
}

func (p payload) downwardAPI(pod *v1.Pod, items []v1.DownwardAPIVolumeFile, mode *int32, node nodeFacts) error {
	for i := range items {
		text, err := downwardText(pod, &items[i], node)
		if err != nil {
			return err
		}
		if err := p.add(items[i].Path, []byte(text), items[i].Mode, mode); err != nil {
			return err
		}
	}
	return nil
}

// downwardText is the text of one file of the downward API.
func downwardText(pod *v1.Pod, item *v1.DownwardAPIVolumeFile, node nodeFacts) (string, error) {
	switch {
	case item.FieldRef != nil:
		part, err := fieldValue(pod, item.FieldRef)
		if err == nil && !strings.HasPrefix(item.FieldRef.FieldPath, "metadata.") {
			// validVolumeDownwardAPIFieldPathExpressions: metadata only.
			err = refuse("UnsupportedField", "fieldRef: fieldPath %q is not one of the API's for a volume; use a metadata field, or an environment variable", item.FieldRef.FieldPath)
		}
		return part.Text, err
	case item.ResourceFieldRef != nil:
		return resourceValue(pod, nil, item.ResourceFieldRef, node)
	}
	return "", refuse("UnsupportedField", "downwardAPI item %q has neither fieldRef nor resourceFieldRef", item.Path)
}

func (p payload) token(ctx context.Context, pod *v1.Pod, objs objects, s *v1.ServiceAccountTokenProjection, mode *int32) error {
	seconds := int64(tokenSeconds)
	if s.ExpirationSeconds != nil {
		seconds = *s.ExpirationSeconds
	}
	token, _, err := objs.Token(ctx, pod, s.Audience, seconds)
	if err != nil {
		return fmt.Errorf("failed to fetch token: %w", err)
	}
	if err := p.add(s.Path, []byte(token), nil, mode); err != nil {
		return err
	}
	at := path.Clean(s.Path)
	f := p[at]
	f.Token = true
	p[at] = f
	return nil
}

// checkVolumePath refuses a path that could leave its volume or meet the
// layout's own names (the kubelet's rules, atomic_writer.go: validatePath).
func checkVolumePath(name string) error {
	bad := func(why string) error {
		return refuse("UnsupportedVolume", "the path %q %s", name, why)
	}
	if name == "" || path.Clean(name) == "." {
		return bad("names no file in the volume")
	}
	if path.IsAbs(name) {
		return bad("is absolute; write it relative to the volume")
	}
	if strings.ContainsRune(name, 0) {
		return bad("holds a NUL byte")
	}
	if len(name) > 4096 {
		return bad("is longer than 4096 bytes")
	}
	for _, part := range strings.Split(name, "/") {
		if part == ".." {
			return bad(`must not contain ".."`)
		}
		if len(part) > 255 {
			return bad("has a part longer than 255 bytes")
		}
	}
	if strings.HasPrefix(path.Clean(name), "..") {
		return bad(`must not start with ".."`)
	}
	return nil
}

// stagePayload lays the files of one volume out below dir.
func stagePayload(dir string, p payload) ([]file, error) {
	names := slices.Sorted(maps.Keys(p))
	version := ".." + payloadHash(p, names)
	data := path.Join(dir, version)
	files := []file{{Name: data, Mode: fs.ModeDir | 0o700}}
	seen := map[string]bool{} // directories made
	var links []file
	for _, name := range names {
		parts := strings.Split(name, "/")
		for i := 1; i < len(parts); i++ {
			parent := strings.Join(parts[:i], "/")
			if _, taken := p[parent]; taken {
				return nil, refuse("UnsupportedVolume", "the path %q is a file, and %q needs it as a directory", parent, name)
			}
			if !seen[parent] {
				seen[parent] = true
				files = append(files, file{Name: path.Join(data, parent), Mode: fs.ModeDir | 0o700})
			}
		}
		files = append(files, file{Name: path.Join(data, name), Mode: p[name].Mode, Body: p[name].Body})
		if top := parts[0]; len(links) == 0 || path.Base(links[len(links)-1].Name) != top {
			links = append(links, file{Name: path.Join(dir, top), Mode: fs.ModeSymlink | 0o777, Link: "..data/" + top})
		}
	}
	files = append(files, file{Name: path.Join(dir, "..data"), Mode: fs.ModeSymlink | 0o777, Link: version})
	return append(files, links...), nil
}

// contentHash is a hash of all but tokens.
func (p payload) contentHash() string {
	plain := payload{}
	for name, f := range p {
		if f.Token {
			f.Body = nil
		}
		plain[name] = f
	}
	return payloadHash(plain, slices.Sorted(maps.Keys(plain)))
}

// payloadHash is a name for exactly these files: paths, modes and bytes, each
// with its length so that no two payloads are written alike. It is as secret as
// what it stands for, and stays within the pod's directory.
func payloadHash(p payload, names []string) string {
	h := sha256.New()
	field := func(b []byte) {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(b))))
		h.Write(b)
	}
	for _, name := range names {
		field([]byte(name))
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(p[name].Mode)))
		field(p[name].Body)
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// nestedMountpoints are the directories in a volume on which a container mounts
// another volume. They must be there before the container starts: the runtime
// cannot make them within a bind, least of all a read-only one (kubelet:
// MakeNestedMountpoints). Where the volume has a file of that first name, the
// mount point is left to the runtime.
func nestedMountpoints(pod *v1.Pod, v *v1.Volume, p payload) []file {
	taken := map[string]bool{}
	for name := range p {
		top, _, _ := strings.Cut(name, "/")
		taken[top] = true
	}
	dirs := map[string]bool{}
	for _, c := range allContainers(pod) {
		for _, inner := range c.VolumeMounts {
			target := mountTarget(inner.MountPath)
			// The volume that holds the mount point is that of the longest
			// mount path above it.
			var holder *v1.VolumeMount
			for i := range c.VolumeMounts {
				m := &c.VolumeMounts[i]
				above := mountTarget(m.MountPath)
				if strings.HasPrefix(target, above+"/") && (holder == nil || len(above) > len(mountTarget(holder.MountPath))) {
					holder = m
				}
			}
			if holder == nil || holder.Name != v.Name || isPlace(pod, holder) || isPlace(pod, &inner) {
				continue // run/places.sh makes those
			}
			rel := strings.TrimPrefix(target, mountTarget(holder.MountPath)+"/")
			if top, _, _ := strings.Cut(rel, "/"); taken[top] {
				continue
			}
			for ; rel != "."; rel = path.Dir(rel) {
				dirs[rel] = true
			}
		}
	}
	var files []file
	for _, rel := range slices.Sorted(maps.Keys(dirs)) {
		files = append(files, file{Name: path.Join("vol", v.Name, rel), Mode: fs.ModeDir | 0o700})
	}
	return files
}

// allContainers are the pod's init containers and containers.
func allContainers(pod *v1.Pod) []*v1.Container {
	var all []*v1.Container
	for i := range pod.Spec.InitContainers {
		all = append(all, &pod.Spec.InitContainers[i])
	}
	for i := range pod.Spec.Containers {
		all = append(all, &pod.Spec.Containers[i])
	}
	return all
}

// mountTarget is a mount path in its one form; a relative one starts at the
// root, as in the kubelet (makeMounts).
func mountTarget(mountPath string) string { return path.Clean("/" + mountPath) }

// mountsOf are the mounts of one container, a mount always after those above
// its path.
func mountsOf(pod *v1.Pod, c *v1.Container) ([]mount, error) {
	var mounts []mount
	targets := map[string]bool{}
	for i := range c.VolumeMounts {
		m := &c.VolumeMounts[i]
		bad := func(format string, args ...any) error {
			return refuse("UnsupportedVolume", "container %s: the mount of volume %q at %q %s", c.Name, m.Name, m.MountPath, fmt.Sprintf(format, args...))
		}
		v, target := volumeOf(pod, m.Name), mountTarget(m.MountPath)
		switch {
		case v == nil:
			return nil, bad("names no volume of the pod")
		case m.MountPath == "" || target == "/":
			return nil, bad("would hide the image; mount it at a directory")
		case strings.ContainsFunc(target, func(r rune) bool { return r < ' ' || r == 0x7f || strings.ContainsRune(`:,"\`, r) }):
			// The API forbids the colon; the others are separators and quotes
			// of the runtime's bind options.
			return nil, bad("has a character that the runtime's bind option cannot carry: one of : , \" \\ or a control character")
		case targets[target]:
			return nil, bad("is the second one at that path")
		}
		if err := checkSubPath(m); err != nil {
			return nil, bad("%v", err)
		}
		targets[target] = true
		mounts = append(mounts, mount{Source: "vol/" + v.Name, Target: target, ReadOnly: m.ReadOnly || isProjection(v), Mount: m})
	}
	slices.SortStableFunc(mounts, func(a, b mount) int {
		return strings.Count(a.Target, "/") - strings.Count(b.Target, "/")
	})
	return mounts, nil
}

// readOnce makes objects answer each name once while a pod is staged: a pod
// whose volumes and variables name one Secret many times reads it once, and
// sees one version of it everywhere. Not for concurrent use.
func readOnce(objs objects) objects {
	return &cachedObjects{objects: objs, configMaps: map[string]answer[*v1.ConfigMap]{}, secrets: map[string]answer[*v1.Secret]{}}
}

type answer[T any] struct {
	object T
	err    error
}

type cachedObjects struct {
	objects
	configMaps map[string]answer[*v1.ConfigMap]
	secrets    map[string]answer[*v1.Secret]
}

func (c *cachedObjects) ConfigMap(ctx context.Context, namespace, name string) (*v1.ConfigMap, error) {
	return once(c.configMaps, namespace+"/"+name, func() (*v1.ConfigMap, error) { return c.objects.ConfigMap(ctx, namespace, name) })
}

func (c *cachedObjects) Secret(ctx context.Context, namespace, name string) (*v1.Secret, error) {
	return once(c.secrets, namespace+"/"+name, func() (*v1.Secret, error) { return c.objects.Secret(ctx, namespace, name) })
}

func once[T any](answers map[string]answer[T], key string, read func() (T, error)) (T, error) {
	a, ok := answers[key]
	if !ok {
		a.object, a.err = read()
		answers[key] = a
	}
	return a.object, a.err
}
