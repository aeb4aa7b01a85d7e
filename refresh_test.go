package knoc

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

// Pods with the same objects, and what of them is read and sent, and when.
func TestRefreshOf(t *testing.T) {
	t.Parallel()
	objs := volumeObjects()
	objs.renew = time.Unix(5000, 0)
	yes := true
	objs.configMaps["steady"] = &v1.ConfigMap{Data: map[string]string{"a": "1"}, Immutable: &yes}
	objs.configMaps["moving"] = &v1.ConfigMap{Data: map[string]string{"a": "1"}}
	pod := testSpec(t, `{volumes: [{name: v, configMap: {name: moving}}, {name: s, configMap: {name: steady}}, {name: e, emptyDir: {}},
		{name: t, projected: {sources: [{serviceAccountToken: {path: token}}, {configMap: {name: moving}}]}},
		{name: d, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}],
		containers: [{name: c, image: i, volumeMounts: [{name: v, mountPath: /v, subPath: a}]}]}`)
	_, sent, err := stageVolumes(t.Context(), pod, objs, nodeFacts{})
	if err != nil || len(sent) != 4 || sent["t"].Renew != 5000 || sent["v"].Renew != 0 {
		t.Fatal(sent, err)
	}
	kept := map[string]any{}
	look := func(at int64, pods int) refresh {
		t.Helper()
		all := &steady{objects: objs, kept: kept, used: map[string]any{}}
		once := readOnce(all)
		var r refresh
		for range pods {
			r = refreshOf(t.Context(), pod, sent, once, nodeFacts{}, time.Unix(at, 0))
		}
		kept = all.used
		return r
	}
	names := func(r refresh) string { return strings.Join(slices.Sorted(mapKeys(r.sent)), " ") }

	objs.reads = 0
	if r := look(1000, 100); r.files != nil || r.problem != "" || objs.reads != 2 || len(objs.tokens) != 1 {
		t.Errorf("nothing has changed: %v %q; %d reads, tokens %v", r.files, r.problem, objs.reads, objs.tokens)
	}
	objs.reads = 0
	if look(1000, 100); objs.reads != 1 {
		t.Errorf("%d reads, though one of two objects is immutable", objs.reads)
	}
	objs.serial = "-2"
	if r := look(5000, 1); names(r) != "t" || len(objs.tokens) != 2 {
		t.Errorf("a token's time has come: %v; tokens %v", r.sent, objs.tokens)
	}
	objs.configMaps["moving"] = &v1.ConfigMap{Data: map[string]string{"b": "2"}}
	pod.Labels = map[string]string{"new": "label"}
	r := look(1000, 1)
	if names(r) != "d t v" {
		t.Errorf("objects have changed: %v", r.sent)
	}
	var do string
	for _, f := range r.files {
		if !strings.HasPrefix(f.Name, "run/refresh.1000") || f.Link != "" {
			t.Errorf("file %s %s", f.Name, f.Link)
		}
		if f.Name == "run/refresh.1000/do" {
			do = string(f.Body)
		}
	}
	if strings.Count(do, "'1' || exit") != 1 {
		t.Errorf("not just the volume with a subPath keeps its versions:\n%s", do)
	}
	sent = r.sent
	if r := look(1000, 1); names(r) != "s" { // was not in sent
		t.Errorf("sent again: %v", r.sent)
	}
	delete(objs.configMaps, "moving")
	if r := look(1000, 1); names(r) != "s" || r.problem != `MountVolume.SetUp failed for volume "t" : configmap "moving" not found` {
		t.Errorf("an object is gone: %v %q", r.sent, r.problem)
	}
}

func mapKeys[V any](m map[string]V) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func TestRenewAt(t *testing.T) {
	now := time.Unix(1e6, 0)
	for _, tc := range []struct{ seconds, want int64 }{{600, 480}, {3607, 2886}, {86400 * 7, 86400}} {
		got := renewAt(now, now.Add(time.Duration(tc.seconds)*time.Second), tc.seconds)
		if d := got.Unix() - now.Unix(); d > tc.want || d < tc.want-11 {
			t.Errorf("a token of %d s is renewed after %d s, want %d", tc.seconds, d, tc.want)
		}
	}
}

// The layout after a refresh is what staging the new objects gives, and whoever
// reads meanwhile sees one version or the other.
func TestRefreshScript(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		objs := volumeObjects()
		old := map[string]string{"both": "1", "gone": "1", ".hidden-gone": "1"}
		for i := range 30 {
			old[fmt.Sprintf("k%d", i)] = "1"
		}
		objs.configMaps["m"] = &v1.ConfigMap{Data: old}
		pod := testSpec(t, `{volumes: [{name: v, configMap: {name: m, items: null}}, {name: e, emptyDir: {}}, {name: evil, configMap: {name: m}}], containers: [{name: c, image: i, volumeMounts: [{name: v, mountPath: /v}, {name: e, mountPath: /v/mnt}]}]}`)
		files, sent, err := stageVolumes(t.Context(), pod, objs, nodeFacts{})
		if err != nil {
			t.Fatal(err)
		}
		dir, outside := t.TempDir(), t.TempDir()
		bring(t, dir, files)
		// Somebody has put a link in a volume's place.
		if err := os.RemoveAll(filepath.Join(dir, "vol/evil")); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(outside, filepath.Join(dir, "vol/evil")); err != nil {
			t.Fatal(err)
		}
		os.WriteFile(filepath.Join(outside, "..data"), nil, 0o600)

		fresh := map[string]string{"both": "2", "new": "2", ".hidden": "2", "mnt": "2"}
		for i := range 30 {
			fresh[fmt.Sprintf("k%d", i)] = "2"
		}
		objs.configMaps["m"] = &v1.ConfigMap{Data: fresh}
		r := refreshOf(t.Context(), pod, sent, readOnce(objs), nodeFacts{}, time.Unix(7, 0))
		bring(t, dir, r.files)
		done := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				// As a careful reader does: a directory once, then from it alone.
				data, err := os.Readlink(filepath.Join(dir, "vol/v/..data"))
				if err != nil {
					t.Errorf("..data: %v", err)
					return
				}
				both, _ := os.ReadFile(filepath.Join(dir, "vol/v", data, "both"))
				last, err := os.ReadFile(filepath.Join(dir, "vol/v", data, "k29"))
				if err == nil && string(both) != string(last) {
					t.Errorf("half of a version: %q %q", both, last)
					return
				}
				if text, err := os.ReadFile(filepath.Join(dir, "vol/v/both")); err != nil || len(text) != 1 {
					t.Errorf("both: %q %v", text, err)
					return
				}
			}
		})
		run := func() {
			c := exec.Command(shell[0], append(slices.Clone(shell[1:]), "run/refresh.7/do", "")...)
			c.Dir = dir
			if out, err := c.CombinedOutput(); err != nil || len(out) > 0 {
				t.Fatalf("%v: %s", err, out)
			}
		}
		run()
		close(done)
		wg.Wait()

		want := t.TempDir()
		again, _, err := stageVolumes(t.Context(), pod, objs, nodeFacts{})
		if err != nil {
			t.Fatal(err)
		}
		bring(t, want, again)
		list := func(root string) []string {
			var all []string
			filepath.WalkDir(filepath.Join(root, "vol/v"), func(p string, d fs.DirEntry, err error) error {
				if err != nil {
					t.Fatal(err)
				}
				line := strings.TrimPrefix(p, root)
				if d.Type()&fs.ModeSymlink != 0 {
					link, _ := os.Readlink(p)
					line += " -> " + link
				} else if !d.IsDir() {
					text, _ := os.ReadFile(p)
					line += " " + string(text)
				}
				all = append(all, line)
				return nil
			})
			return all
		}
		got, expected := list(dir), list(want)
		// A file does not take the place that a container mounts on.
		expected = slices.DeleteFunc(expected, func(s string) bool { return s == "/vol/v/mnt -> ..data/mnt" })
		got = slices.DeleteFunc(got, func(s string) bool { return s == "/vol/v/mnt" })
		if diff := cmp.Diff(expected, got); diff != "" {
			t.Errorf("(-staged +refreshed):\n%s", diff)
		}
		if entries, _ := os.ReadDir(outside); len(entries) != 1 {
			t.Errorf("a link was followed: %v", entries)
		}
		if _, err := os.Stat(filepath.Join(dir, "run/refresh.7")); err == nil {
			t.Error("what was brought is still there")
		}
		// Cut somewhere, and sent again.
		bring(t, dir, r.files)
		run()
		if diff := cmp.Diff(expected, slices.DeleteFunc(list(dir), func(s string) bool { return s == "/vol/v/mnt" })); diff != "" {
			t.Errorf("after the same once more:\n%s", diff)
		}
	})
}

// bring makes files as tar does.
func bring(t *testing.T, root string, files []file) {
	t.Helper()
	for _, f := range files {
		name := filepath.Join(root, f.Name)
		err := os.MkdirAll(filepath.Dir(name), 0o700)
		switch {
		case err != nil:
		case f.Mode.IsDir():
			err = os.MkdirAll(name, 0o700)
		case f.Link != "":
			err = os.Symlink(f.Link, name)
		default:
			err = os.WriteFile(name, f.Body, f.Mode.Perm())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// lockedObjects are objects that a test changes while knoc reads them.
type lockedObjects struct {
	mu sync.Mutex
	fakeObjects
}

func (o *lockedObjects) ConfigMap(ctx context.Context, _, name string) (*v1.ConfigMap, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.fakeObjects.ConfigMap(ctx, "ns", name)
}

func (o *lockedObjects) set(text string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.configMaps = map[string]*v1.ConfigMap{"m": {Data: map[string]string{"k": text}}}
}

// A changed object comes into a running pod, and into one in the queue; a knoc
// that starts again knows what it has sent.
func TestRefreshReachesPods(t *testing.T) {
	k := newKnocTest(t)
	objs := &lockedObjects{}
	objs.set("one")
	k.objs = objs
	k.start()
	pod := k.pod("a", k.untilGo("a")+"cat \"$V/k\"")
	pod.Spec.Volumes = []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "m"}}}}}
	pod.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "v", MountPath: "/v"}}
	k.api.create(pod)
	k.wait(pod.UID, "running", inPhase(v1.PodRunning))
	path := ".knoc/knoc-c1/" + string(pod.UID) + "/vol/v/k"
	read := func() string { return k.cluster.Sh("cat " + path) }
	if text := read(); text != "one" {
		t.Fatalf("staged %q", text)
	}
	objs.set("two")
	k.leapUntil(refreshEvery, func() bool { return read() == "two" })
	if text := read(); text != "two" {
		t.Fatalf("%q after a change", text)
	}
	k.stop()
	<-k.done
	objs.set("three")
	k.start()
	k.leapUntil(refreshEvery, func() bool { return read() == "three" })
	if text := read(); text != "three" {
		t.Fatalf("%q after a change while knoc was away", text)
	}
	count := func() string { return k.cluster.Sh("ls .knoc/knoc-c1/" + string(pod.UID) + "/cmd | wc -l") }
	before := count()
	for range 5 {
		k.leap(refreshEvery)
		time.Sleep(200 * time.Millisecond)
	}
	if after := count(); after != before {
		t.Errorf("commands though nothing has changed: %s, then %s", before, after)
	}
	k.letEnd("a")
}
