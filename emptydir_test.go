package knoc

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestNodeDirs(t *testing.T) {
	t.Parallel()
	const spec = `{%svolumes: [{name: a, emptyDir: {}}, {name: b, emptyDir: {medium: Memory}}, {name: c}, {name: cm, configMap: {name: cm}}], containers: [{name: c, image: i, volumeMounts: [{name: b, mountPath: /b}, {name: a, mountPath: /b/x/y}]}]}`
	for _, tc := range []struct{ annotation, more, want string }{
		{"", "", `"$shm"/b [ "$shm"/'b/x' "$shm"/'b/x/y']`},
		{"a", "", `"$scratch/.vol"/a []; "$shm"/b [ "$shm"/'b/x' "$shm"/'b/x/y']`},
		{"*", "", `"$scratch/.vol"/a []; "$shm"/b [ "$shm"/'b/x' "$shm"/'b/x/y']; "$scratch/.vol"/c []`},
		{"a, c", "securityContext: {runAsUser: 5}, ", `"$shm"/b [ "$shm"/'b/x' "$shm"/'b/x/y']`},
	} {
		pod := testSpec(t, fmt.Sprintf(spec, tc.more))
		pod.Annotations = map[string]string{AnnotationScratchVolumes: tc.annotation}
		var got []string
		for _, d := range nodeDirs(pod) {
			text := string(d.Root) + "/" + d.Volume + " ["
			for _, b := range d.Below {
				text += " " + string(b)
			}
			got = append(got, text+"]")
		}
		if text := strings.Join(got, "; "); text != tc.want {
			t.Errorf("%q: %s, want %s", tc.annotation, text, tc.want)
		}
		// What pod.sh makes is not staged.
		files, _, err := stageVolumes(t.Context(), pod, volumeObjects(), nodeFacts{})
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			for _, d := range nodeDirs(pod) {
				if f.Name == "vol/"+d.Volume || strings.HasPrefix(f.Name, "vol/"+d.Volume+"/") {
					t.Errorf("%q: %s is staged", tc.annotation, f.Name)
				}
			}
		}
	}
	pod := testSpec(t, `volumes: [{name: a, emptyDir: {}}, {name: cm, configMap: {name: cm}}]`)
	for text, want := range map[string]string{"a": "", "*": "", "b": `"b": the pod has no emptyDir`, "a,cm": `"cm": the pod has no emptyDir`} {
		pod.Annotations = map[string]string{AnnotationScratchVolumes: text}
		if _, err := checkPod(pod); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// emptyDirs in memory and on scratch are there while the pod runs, and go with it;
// what a killed job left there goes too.
func TestPodScriptNodeDirs(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		pod := scriptPod(v1.RestartPolicyOnFailure, shContainer("a", `
			cd vol && readlink mem tmp && stat -c %a mem/. tmp/. && ls mem
			[ -e mem/once ] || { echo x >mem/once; mkdir -m 0 tmp/none; exit 1; }`))
		limit := resource.MustParse("1Gi")
		pod.Spec.Volumes = []v1.Volume{
			{Name: "mem", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory, SizeLimit: &limit}}},
			{Name: "tmp", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}},
		}
		pod.Annotations = map[string]string{AnnotationScratchVolumes: "*"}
		b := newBase(t)
		w := stageScript(t, b, pod, nil)
		tmp := filepath.Join(b.dir, "tmp")
		memory := fmt.Sprintf("/dev/shm/knoc-%d", os.Getuid())
		left := fmt.Sprintf("%s/5.%d.1", memory, os.Getpid()) // this process has started at another time
		for _, d := range []string{tmp, memory, left, left + "/x"} {
			if err := os.MkdirAll(d, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		w.start(shell, "7", "TMPDIR="+tmp)
		if code := w.end(); code != 0 {
			t.Fatalf("exit code %d; stderr: %s; journal %s; log %s", code, w.stderr.String(), w.read("journal.0"), w.read("log/a.0"))
		}
		first := strings.Split(w.read("log/a.0"), "\n")
		if len(first) < 4 || !strings.HasPrefix(first[0], memory+"/7.") || !strings.HasSuffix(first[0], "/mem") || !strings.HasPrefix(first[1], tmp+"/knoc-") || !strings.HasSuffix(first[1], "/.vol/tmp") || first[2] != "700" {
			t.Errorf("log %q", first)
		}
		if second := w.read("log/a.1"); !strings.HasSuffix(second, "\nonce\n") {
			t.Errorf("the second log is %q", second)
		}
		for _, d := range []string{left, filepath.Dir(first[0]), filepath.Dir(filepath.Dir(first[1]))} {
			if _, err := os.Stat(d); err == nil {
				t.Errorf("%s is still there", d)
			}
		}
	})
}

func TestPodScriptSizeLimit(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		pod := scriptPod(v1.RestartPolicyAlways, shContainer("a", `head -c 200000 /dev/zero >vol/e/x; `+untilTerm))
		small, large := resource.MustParse("100Ki"), resource.MustParse("1Mi")
		pod.Spec.Volumes = []v1.Volume{
			{Name: "e", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{SizeLimit: &small}}},
			{Name: "f", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{SizeLimit: &large}}},
		}
		w := stageScript(t, newBase(t), pod, nil)
		for _, v := range []string{"vol/e", "vol/f"} {
			if err := os.MkdirAll(filepath.Join(w.dir, v), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		w.patch("$((beat % 60)) -eq 30", "$((beat % 2)) -eq 0")
		w.start(shell, "7")
		w.end()
		w.order("start a 0", "full e", "stopping 1", "kill a 0 stop 1", "exit a 0 4", "done 1")

		journal := parseJournal([]byte(w.read("journal.0")))
		o := observed{Journal: journal, Submitted: true, Job: job{ID: "7", State: "FAILED"}}
		const text = `Usage of EmptyDir volume "e" exceeds the limit "100Ki". `
		if s := fold(pod, o); s.Phase != v1.PodFailed || s.Reason != "Evicted" || s.Message != text {
			t.Errorf("status %s %s %q", s.Phase, s.Reason, s.Message)
		}
		var events []string
		for _, list := range eventsOf(pod, &o, journal, 0) {
			for _, e := range list {
				if e.kind == v1.EventTypeWarning {
					events = append(events, e.container+e.reason+": "+e.message)
				}
			}
		}
		if diff := cmp.Diff([]string{"Evicted: " + text}, events); diff != "" {
			t.Error(diff)
		}
	})
}
