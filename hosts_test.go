package knoc

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"
)

// claimObjects has claims and what they are bound to.
type claimObjects struct {
	fakeObjects
	claims  map[string]*v1.PersistentVolumeClaim
	volumes map[string]*v1.PersistentVolume
}

func (o *claimObjects) Claim(_ context.Context, namespace, name string) (*v1.PersistentVolumeClaim, error) {
	if c := o.claims[name]; c != nil && namespace == "ns" {
		return c, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "persistentvolumeclaims"}, name)
}

func (o *claimObjects) PersistentVolume(_ context.Context, name string) (*v1.PersistentVolume, error) {
	if v := o.volumes[name]; v != nil {
		return v, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "persistentvolumes"}, name)
}

func TestHostVolumes(t *testing.T) {
	t.Parallel()
	cfg := Config{HostPaths: []string{"/data/", "/data/pods", "/"}, VolumePaths: []string{"/mnt=/lustre/mnt", "/mnt/fast/=/nvme/", "nas:/export=/nfs/export", "nas:/=/nfs"}}
	objs := &claimObjects{claims: map[string]*v1.PersistentVolumeClaim{}, volumes: map[string]*v1.PersistentVolume{}}
	claim := func(name, source string, change ...func(*v1.PersistentVolumeClaim)) {
		pvc := &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name)}, Spec: v1.PersistentVolumeClaimSpec{VolumeName: "pv-" + name}, Status: v1.PersistentVolumeClaimStatus{Phase: v1.ClaimBound}}
		pv := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv-" + name}}
		if err := yaml.UnmarshalStrict([]byte(source), &pv.Spec); err != nil {
			t.Fatal(err)
		}
		pv.Spec.ClaimRef = &v1.ObjectReference{UID: pvc.UID}
		for _, f := range change {
			f(pvc)
		}
		objs.claims[name], objs.volumes[pv.Name] = pvc, pv
	}
	claim("host", `{hostPath: {path: /mnt/a/, type: DirectoryOrCreate}}`)
	claim("local", `{local: {path: /mnt/fast}}`)
	claim("nfs", `{nfs: {server: nas, path: /export/x, readOnly: true}}`)
	claim("csi", `{csi: {driver: d, volumeHandle: h}}`)
	claim("elsewhere", `{local: {path: /mnt2}}`)
	claim("pending", `{}`, func(c *v1.PersistentVolumeClaim) { c.Status.Phase = v1.ClaimPending })
	claim("deleted", `{}`, func(c *v1.PersistentVolumeClaim) { c.DeletionTimestamp = &metav1.Time{} })
	claim("anothers", `{local: {path: /mnt}}`, func(c *v1.PersistentVolumeClaim) { c.UID = "u" })
	claim("no-pv", `{}`, func(c *v1.PersistentVolumeClaim) { c.Spec.VolumeName = "gone" })
	block := v1.PersistentVolumeBlock
	claim("block", `{local: {path: /mnt}}`, func(c *v1.PersistentVolumeClaim) { c.Spec.VolumeMode = &block })

	const unable = `FailedMount: Unable to attach or mount volumes: unmounted volumes=[v], unattached volumes=[], failed to process volumes=[v]: error processing PVC ns/`
	for _, tc := range []struct{ source, want string }{
		{`hostPath: {path: /data/pods/x}`, "/data/pods x any /data/pods/x"},
		{`hostPath: {path: /data//x/., type: Socket}`, "/data x Socket /data/x"},
		{`hostPath: {path: /data}`, "/data  any /data"},
		{`hostPath: {path: /database}`, "/ database any /database"},
		{`nfs: {server: nas, path: /export/a b}`, "/nfs/export a b Directory /nfs/export/a b"},
		{`nfs: {server: nas, path: /exports, readOnly: true}`, "/nfs exports Directory /nfs/exports ro"},
		{`nfs: {server: other, path: /export}`, `UnsupportedVolume: volume v: the NFS directory "other:/export" is below no path that knoc's --volume-path maps`},
		{`persistentVolumeClaim: {claimName: host}`, "/lustre/mnt a DirectoryOrCreate /lustre/mnt/a"},
		{`persistentVolumeClaim: {claimName: local, readOnly: true}`, "/nvme  Directory /nvme ro"},
		{`persistentVolumeClaim: {claimName: nfs}`, "/nfs/export x Directory /nfs/export/x ro"},
		{`persistentVolumeClaim: {claimName: csi}`, "UnsupportedVolume: volume v: persistentVolume pv-csi is of a kind that knoc cannot reach"},
		{`persistentVolumeClaim: {claimName: elsewhere}`, `UnsupportedVolume: volume v: the path of persistentVolume pv-elsewhere, "/mnt2" is below no path`},
		{`persistentVolumeClaim: {claimName: block}`, "UnsupportedVolume: volume v: volume v has volumeMode Block, but is specified in volumeMounts"},
		{`persistentVolumeClaim: {claimName: gone}`, unable + `gone: failed to fetch PVC from API server: persistentvolumeclaims "gone" not found`},
		{`persistentVolumeClaim: {claimName: pending}`, unable + "pending: PVC is not bound"},
		{`persistentVolumeClaim: {claimName: deleted}`, unable + "deleted: PVC is being deleted"},
		{`persistentVolumeClaim: {claimName: no-pv}`, unable + `no-pv: failed to fetch PV gone from API server: persistentvolumes "gone" not found`},
		{`persistentVolumeClaim: {claimName: anothers}`, unable + `anothers: found PV object pv-anothers but its pv.Spec.ClaimRef.UID uid-anothers does not point to claim.UID u`},
	} {
		pod := testSpec(t, `{volumes: [{name: unused, persistentVolumeClaim: {claimName: pending}}, {name: v, `+tc.source+`}], containers: [{name: c, image: i, volumeMounts: [{name: v, mountPath: /v}]}]}`)
		list, err := hostVolumes(t.Context(), pod, objs, cfg)
		if err != nil {
			if !strings.HasPrefix(err.Error(), tc.want) {
				t.Errorf("%s:\ngot  %v\nwant %s", tc.source, err, tc.want)
			}
			continue
		}
		h := list[0]
		got := strings.Join([]string{h.Base, h.Path, h.Type, h.Shown}, " ")
		if h.ReadOnly {
			got += " ro"
		}
		if len(list) != 1 || h.Volume != "v" || got != tc.want {
			t.Errorf("%s: got %q of %d, want %q", tc.source, got, len(list), tc.want)
		}
		mounts, err := runtimeArgv(pod, &pod.Spec.Containers[0], scriptConfig{Dir: "/d", Runtime: "apptainer", Hosted: list})
		if text := fmt.Sprint(mounts); err != nil || strings.Contains(text, "destination=/v,ro") != h.ReadOnly || !strings.Contains(text, "source=/d/run/pod.places/1.0,destination=/v") {
			t.Errorf("%s: %v %s", tc.source, err, text)
		}
	}
	pod := testSpec(t, `{volumes: [{name: v, hostPath: {path: /etc}}], containers: [{name: c, image: i, volumeMounts: [{name: v, mountPath: /v}]}]}`)
	_, err := hostVolumes(t.Context(), pod, objs, Config{})
	checkError(t, err, `volume v: the hostPath "/etc" is not below a directory that knoc's --host-path allows`, false)
	pod = testSpec(t, `{volumes: [{name: v, persistentVolumeClaim: {claimName: c}}], containers: [{name: c, image: i, volumeMounts: [{name: v, mountPath: /v}]}]}`)
	_, err = hostVolumes(t.Context(), pod, &fakeObjects{}, Config{})
	checkError(t, err, `a classic ResourceManager knows no persistentVolumeClaims`, false)

	for _, bad := range []Config{{HostPaths: []string{"data"}}, {HostPaths: []string{"/a b"}}, {VolumePaths: []string{"/a"}}, {VolumePaths: []string{"a=/b"}}, {VolumePaths: []string{"/a=b"}}} {
		if bad.checkHostPaths() == nil {
			t.Errorf("no error for %q %q", bad.HostPaths, bad.VolumePaths)
		}
	}
	if err := cfg.checkHostPaths(); err != nil {
		t.Error(err)
	}
}

// hostRun has run/places.sh look for one volume of the machine, below an allowed
// directory that stands for $DIR in the spec.
func hostRun(t *testing.T, shell []string, room, hostPath, before, script string) (out, lost string) {
	t.Helper()
	w := newPlaceRun(t, "{}")
	allowed := filepath.Join(filepath.Dir(w.dir), "allowed")
	home := filepath.Join(filepath.Dir(w.dir), "home")
	for _, d := range []string{allowed, home + "/.ssh", home + "/.apptainer/cache", home + "/work"} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	// The pod's directory is two below the remote one, as on a cluster.
	dir := filepath.Join(home, ".knoc/node/pod")
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(w.dir, dir); err != nil {
		t.Fatal(err)
	}
	w.dir = dir
	w.sh("cd " + allowed + "; home=" + home + "; " + before)
	pod := testSpec(t, strings.ReplaceAll(`{volumes: [{name: e, hostPath: {`+hostPath+`}}], containers: [{name: c, image: i, volumeMounts: [{name: e, mountPath: /m}]}]}`, "$DIR", allowed))
	cfg := Config{HostPaths: []string{allowed, home, "/dev"}}
	if strings.Contains(hostPath, "path: /,") {
		cfg.HostPaths = []string{"/"}
	}
	pod.Spec.Volumes[0].HostPath.Path = strings.ReplaceAll(pod.Spec.Volumes[0].HostPath.Path, "$HOME", home)
	hosted, err := hostVolumes(t.Context(), pod, &fakeObjects{}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	s, err := newPodScript(pod, scriptConfig{Dir: dir, Hosted: hosted, HostPaths: allowedPaths(cfg)})
	if err != nil {
		t.Fatal(err)
	}
	text, err := render("places.sh.tmpl", s)
	if err != nil {
		t.Fatal(err)
	}
	writeProgram(t, filepath.Join(dir, "run/places.sh"), text)
	out, lost = w.run(shell, room, script, "HOME="+home)
	return out, strings.NewReplacer(allowed, "$DIR", home, "$HOME").Replace(strings.TrimPrefix(lost, `MountVolume.SetUp failed for volume "e" : `))
}

func TestHostPaths(t *testing.T) {
	t.Parallel()
	const (
		ls    = `ls -A run/pod.places/1.0/`
		away  = `$DIR/x leads out of what knoc's --host-path and --volume-path allow`
		own   = ` leads to the files of knoc, of SSH or of the container runtime`
		check = `hostPath type check failed: $DIR/x is not a`
	)
	for _, tc := range []struct{ name, hostPath, before, script, want, lost string }{
		{"any directory", `path: $DIR/x`, "mkdir x; touch x/f", ls, "f\n", ""},
		{"any file", `path: $DIR/x`, "echo text >x", "cat run/pod.places/1.0", "text\n", ""},
		{"any that is missing", `path: $DIR/a/x`, "", "cd -P run/pod.places/1.0; stat -c %a .", "755\n", ""},
		{"the allowed one itself", `path: $DIR`, "touch f", ls, "f\n", ""},
		{"a link within", `path: $DIR/x, type: Directory`, "mkdir a; touch a/f; ln -s a x", ls, "f\n", ""},
		{"a link to what is allowed", `path: $DIR/x`, `touch "$home/work/f"; ln -s "$home/work" x`, ls, "f\n", ""},
		{"Directory", `path: $DIR/x, type: Directory`, "mkdir x; touch x/f", ls, "f\n", ""},
		{"DirectoryOrCreate", `path: $DIR/x/y, type: DirectoryOrCreate`, "", "cd -P run/pod.places/1.0; stat -c %a .", "755\n", ""},
		{"File", `path: $DIR/x, type: File`, "echo text >x", "cat run/pod.places/1.0", "text\n", ""},
		{"FileOrCreate", `path: $DIR/x, type: FileOrCreate`, "", "echo t >>run/pod.places/1.0; stat -Lc %a,%s run/pod.places/1.0", "644,2\n", ""},
		{"FileOrCreate there", `path: $DIR/x, type: FileOrCreate`, "echo text >x", "cat run/pod.places/1.0", "text\n", ""},
		{"CharDevice", `path: /dev/null, type: CharDevice`, "", "[ -c run/pod.places/1.0 ] && echo yes", "yes\n", ""},
		{"a hostile name", `path: "$DIR/it's $(id) \"x\""`, "", ls, "", ""},

		{"no Directory", `path: $DIR/x, type: Directory`, "", ls, "", check + " directory"},
		{"a file as Directory", `path: $DIR/x, type: Directory`, "touch x", ls, "", check + " directory"},
		{"a file as DirectoryOrCreate", `path: $DIR/x, type: DirectoryOrCreate`, "touch x", ls, "", check + " directory"},
		{"no File", `path: $DIR/x, type: File`, "", ls, "", check + " file"},
		{"a directory as FileOrCreate", `path: $DIR/x, type: FileOrCreate`, "mkdir x", ls, "", check + " file"},
		{"FileOrCreate without its directory", `path: $DIR/a/x, type: FileOrCreate`, "", ls, "", `hostPath type check failed: $DIR/a/x is not a file`},
		{"no Socket", `path: $DIR/x, type: Socket`, "touch x", ls, "", check + " socket file"},
		{"no CharDevice", `path: $DIR/x, type: CharDevice`, "touch x", ls, "", check + " character device"},
		{"no BlockDevice", `path: /dev/null, type: BlockDevice`, "", ls, "", "hostPath type check failed: /dev/null is not a block device"},
		{"through a file", `path: $DIR/x/y`, "touch x", ls, "", "$DIR/x/y cannot be made"},
		{"a link out", `path: $DIR/x`, `ln -s "$1" x`, ls, "", away},
		{"a link to a file out", `path: $DIR/x`, `ln -s "$1/key" x`, ls, "", away},
		{"a relative link out", `path: $DIR/x`, `ln -s ../outside x`, ls, "", away},
		{"making one behind a link", `path: $DIR/x/y`, `ln -s ../outside x`, ls, "", "$DIR/x/y cannot be made"},
		{"making a file behind a link", `path: $DIR/x/y, type: FileOrCreate`, `ln -s ../outside x`, ls, "", "hostPath type check failed: $DIR/x/y is not a file"},
		{"a neighbour of the same beginning", `path: $DIR/x`, `mkdir ../allowed2; ln -s ../allowed2 x`, ls, "", away},
		{"keys", `path: $HOME/.ssh`, "", ls, "", "$HOME/.ssh" + own},
		{"a key", `path: $HOME/.ssh/id`, "touch $home/.ssh/id", ls, "", "$HOME/.ssh/id" + own},
		{"above keys", `path: $HOME`, "", ls, "", "$HOME" + own},
		{"keys by a link", `path: $DIR/x`, `ln -s "$home/work/../.ssh" x`, ls, "", "$DIR/x" + own},
		{"pods", `path: $HOME/.knoc/node`, "", ls, "", "$HOME/.knoc/node" + own},
		{"the cache", `path: $HOME/.apptainer/cache, type: Directory`, "", ls, "", "$HOME/.apptainer/cache" + own},
		{"everything", `path: /, type: Directory`, "", ls, "", "/" + own},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			eachRoom(t, func(t *testing.T, shell []string, room string) {
				out, lost := hostRun(t, shell, room, tc.hostPath, tc.before, tc.script)
				if diff := cmp.Diff([]string{tc.want, tc.lost}, []string{out, lost}); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
	eachShell(t, func(t *testing.T, shell []string) {
		d, err := os.MkdirTemp("", "knoc") // a socket's path must be short
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(d)
		l, err := net.Listen("unix", d+"/s")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		out, lost := hostRun(t, shell, "", `path: $DIR/s, type: Socket`, "ln "+d+"/s s || cp -a "+d+"/s s", `[ -S run/pod.places/1.0 ] && echo yes`)
		if out != "yes\n" || lost != "" {
			t.Errorf("socket: %q %q", out, lost)
		}
	})
}

// A pod whose volume the machine lacks starts nothing.
func TestPodScriptHostPath(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		pod := scriptPod(v1.RestartPolicyAlways, shContainer("i1", "echo ran"), shContainer("a", "echo ran"))
		dir := v1.HostPathDirectory
		pod.Spec.Volumes = []v1.Volume{{Name: "data", VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: "/nowhere/data", Type: &dir}}}}
		pod.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/m"}}
		hosted, err := hostVolumes(t.Context(), pod, &fakeObjects{}, Config{HostPaths: []string{"/nowhere"}})
		if err != nil {
			t.Fatal(err)
		}
		w := stageScriptWith(t, newBase(t), pod, nil, scriptConfig{Hosted: hosted, HostPaths: []string{"/nowhere"}})
		w.start(shell, "7")
		if code := w.end(); code != 1 {
			t.Errorf("exit code %d, want 1; stderr: %s", code, w.stderr.String())
		}
		if diff := cmp.Diff([]string{"nomount data", "done 1"}, w.facts("journal.0")); diff != "" {
			t.Error(diff)
		}
		const text = `MountVolume.SetUp failed for volume "data" : hostPath type check failed: /nowhere/data is not a directory`
		if got := w.read("msg/data.mount"); got != text {
			t.Errorf("msg/data.mount is %q", got)
		}
		journal := parseJournal([]byte(w.read("journal.0")))
		o := observed{Journal: journal, Submitted: true, Job: job{ID: "7", State: "FAILED"}, Messages: map[string]string{"data.mount": text}}
		if s := fold(pod, o); s.Phase != v1.PodFailed || s.Reason != "FailedMount" || s.Message != text {
			t.Errorf("status %s %s %q", s.Phase, s.Reason, s.Message)
		}
		var events []podEvent
		for _, list := range eventsOf(pod, &o, journal, 0) {
			events = append(events, list...)
		}
		if len(events) != 1 || events[0] != (podEvent{"", v1.EventTypeWarning, "FailedMount", text}) {
			t.Errorf("events %v", events)
		}
	})
}
