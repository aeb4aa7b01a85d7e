package knoc

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

// A container's /dev is a directory of the node's scratch wherever it is known
// how the runtime's own can be mounted in it.
func TestPodScriptDev(t *testing.T) {
	t.Parallel()
	const session = "var/lib/apptainer/mnt/session"
	const script = `[ -n "$KNOC_TEST_DEV" ] || exit 9; cd "$KNOC_TEST_DEV" && ls -d * sub/* && readlink null && echo hi >"$KNOC_TEST_MESSAGE" && exit 3`
	at := func(path string) *v1.Pod {
		c := shContainer("a", script)
		c.TerminationMessagePath = path
		c.VolumeMounts = []v1.VolumeMount{{Name: "v", MountPath: "/dev/shm"}, {Name: "v", MountPath: "/dev/sub/volume"}}
		pod := scriptPod(v1.RestartPolicyNever, c)
		pod.Spec.Volumes = []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}}
		return pod
	}
	eachShell(t, func(t *testing.T, shell []string) {
		for _, tc := range []struct {
			name, path string
			make       func(b base)
			known      bool
		}{
			{"beside the runtime", "/dev/termination-log", func(b base) { os.MkdirAll(filepath.Join(b.dir, session), 0o700) }, true},
			{"asked for", "/dev/sub/termination-log", func(b base) {
				writeProgram(t, filepath.Join(b.bin, "apptainer"), "#!/bin/sh\n[ \"$*\" != \"buildcfg SESSIONDIR\" ] || { echo /x/session; exit; }"+strings.TrimPrefix(stubRuntime, "#!/bin/sh"))
			}, true},
			{"not known", "/dev/sub/termination-log", func(base) {}, false},
			{"not known and not named", "/dev/termination-log", func(base) {}, false},
			{"set-uid", "/dev/sub/termination-log", func(b base) {
				os.MkdirAll(filepath.Join(b.dir, session), 0o700)
				os.MkdirAll(filepath.Join(b.dir, "libexec", "apptainer", "bin"), 0o700)
				starter := filepath.Join(b.dir, "libexec", "apptainer", "bin", "starter-suid")
				writeProgram(t, starter, "")
				if err := os.Chmod(starter, 0o700|os.ModeSetuid); err != nil {
					t.Fatal(err)
				}
			}, false},
		} {
			t.Run(tc.name, func(t *testing.T) {
				t.Parallel()
				b := newBase(t)
				tc.make(b)
				w := stageScript(t, b, at(tc.path), nil)
				w.start(shell, "7", "TMPDIR="+t.TempDir())
				w.end()
				rest, _ := belowDev(tc.path)
				names := append(slices.Clone(runtimeDevices), "sub", "sub/volume", rest)
				slices.Sort(names)
				names = slices.Compact(names)
				log, message := strings.Join(names, "\n")+"\n.d/null\n", "hi\n"
				want := []string{"start a 0", "message a 0", "exit a 0 3", "done 1"}
				if !tc.known {
					log, message = "", ""
					want = []string{"start a 0", "exit a 0 9", "done 1"}
					if tc.path != v1.TerminationMessagePathDefault {
						want = append([]string{"nodev"}, want...)
					}
				}
				if diff := cmp.Diff(want, w.facts("journal.0")); diff != "" {
					t.Errorf("journal (-want +got):\n%s\nstderr: %s", diff, w.stderr.String())
				}
				if got := w.read("log/a.0"); tc.known && got != log {
					t.Errorf("/dev has %q, want %q", got, log)
				}
				if got := w.read("msg/a.0"); got != message {
					t.Errorf("the message is %q, want %q", got, message)
				}
			})
		}
	})
}

func TestDevFiles(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		message string
		volumes []string
		want    string
	}{
		{"", nil, "termination-log"},
		{"/say", nil, ""},
		{"/say", []string{"/dev/shm"}, ""},
		{"/say", []string{"/dev/hugepages"}, "'' hugepages"},
		{"/dev/a/say", []string{"/dev/shm", "/dev/b/c", "/data"}, "a/say shm b/c"},
		{"/dev/shm/say", []string{"/dev/shm"}, ""}, // in the volume
		{"/dev/v/say", []string{"/dev/v", "/dev/v/w"}, "'' v"},
		{"/dev/termination-log", []string{"/dev/termination-log"}, "'' termination-log"},
	} {
		c := &v1.Container{Name: "c", TerminationMessagePath: tc.message}
		pod := &v1.Pod{}
		pod.Spec.Volumes = []v1.Volume{{Name: "v"}}
		for _, at := range tc.volumes {
			c.VolumeMounts = append(c.VolumeMounts, v1.VolumeMount{Name: "v", MountPath: at})
		}
		var words []string
		for _, w := range devOf(pod, c) {
			words = append(words, string(w))
		}
		if got := strings.Join(words, " "); got != tc.want {
			t.Errorf("message at %q and volumes at %q: %q, want %q", tc.message, tc.volumes, got, tc.want)
		}
	}
}
