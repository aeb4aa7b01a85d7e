package knoc

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

// placesPod has containers that see parts of volumes, in every way.
func placesPod(t *testing.T) *v1.Pod {
	return testSpec(t, `
volumes: [{name: e, emptyDir: {}}, {name: cm, configMap: {name: cm}}, {name: w, emptyDir: {}}]
initContainers:
- {name: i, image: busybox, volumeMounts: [{name: e, mountPath: /e}]}
containers:
- name: config
  image: busybox
  volumeMounts: [{name: cm, mountPath: /etc/app.conf, subPath: a.conf}, {name: cm, mountPath: /etc/none, subPath: none}]
- name: main
  image: busybox
  command: [sh, -c, "true"]
  volumeMounts:
  - {name: e, mountPath: /data, subPath: deep/er}
  - {name: e, mountPath: /data/nested/file, subPath: "it's $(id)", readOnly: true}
  - {name: w, mountPath: /data/w}
  - {name: w, mountPath: /x, subPathExpr: "$(B)/$(A)-$$(C)/$(no.shell)"}
`)
}

// placeRun is a pod's directory with run/places.sh in it. Whatever container runs
// through it is a shell command here, which sees the places where a runtime would.
type placeRun struct {
	t        *testing.T
	dir      string
	outside  string
	commands string // put first in PATH
}

func newPlaceRun(t *testing.T, spec string) *placeRun {
	t.Helper()
	root := t.TempDir()
	w := &placeRun{t, filepath.Join(root, "pod"), filepath.Join(root, "outside"), filepath.Join(root, "bin")}
	for _, d := range []string{"run", "msg", "vol/e", "vol/cm/..1"} {
		w.make(d)
	}
	for _, d := range []string{w.outside, w.commands} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	w.sh(`echo secret >"$1/key"; mkdir "$1/dir"; ln -s ..1 vol/cm/..data; echo conf >vol/cm/..1/a.conf; ln -s ..data/a.conf vol/cm/a.conf`)
	s, err := newPodScript(testSpec(t, spec), scriptConfig{Dir: w.dir})
	if err != nil {
		t.Fatal(err)
	}
	text, err := render("places.sh.tmpl", s)
	if err != nil {
		t.Fatal(err)
	}
	writeProgram(t, filepath.Join(w.dir, "run/places.sh"), text)
	return w
}

func (w *placeRun) make(name string) {
	w.t.Helper()
	if err := os.MkdirAll(filepath.Join(w.dir, name), 0o700); err != nil {
		w.t.Fatal(err)
	}
}

// sh runs a command in the pod's directory; $1 is a directory outside of it.
func (w *placeRun) sh(script string) {
	w.t.Helper()
	c := exec.Command("sh", "-ec", "umask 077; "+script, "sh", w.outside)
	c.Dir = w.dir
	if out, err := c.CombinedOutput(); err != nil {
		w.t.Fatalf("%s: %v: %s", script, err, out)
	}
}

// run starts the first container, with a shell command for a runtime; it returns
// what that printed and the message of a container that could not be made.
func (w *placeRun) run(shell []string, room, script string, env ...string) (out, lost string) {
	w.t.Helper()
	words := append(strings.Fields(room), shell...)
	words = append(words, "run/places.sh", "1", "vol", room, shell[0])
	words = append(words, shell[1:]...)
	c := exec.Command(words[0], append(words[1:], "-c", script)...)
	c.Dir = w.dir
	c.Env = append(os.Environ(), append(env, "PATH="+w.commands+":"+os.Getenv("PATH"), "OUTSIDE="+w.outside)...)
	text, err := c.CombinedOutput()
	message, _ := os.ReadFile(filepath.Join(w.dir, "msg/c"))
	_, flag := os.Stat(filepath.Join(w.dir, "run/c.lost"))
	os.Remove(filepath.Join(w.dir, "run/c.lost"))
	os.Remove(filepath.Join(w.dir, "msg/c"))
	if code := c.ProcessState.ExitCode(); (code == 128) != (flag == nil) || (code == 128) != (len(message) > 0) || code != 128 && err != nil {
		w.t.Fatalf("exit code %d, flag %v, message %q, output %q", code, flag, message, text)
	}
	return string(text), string(message)
}

// eachRoom runs a test under every shell, with and without namespaces.
func eachRoom(t *testing.T, test func(t *testing.T, shell []string, room string)) {
	rooms := map[string]string{"links": ""}
	if err := exec.Command("unshare", "-r", "-m", "mount", "-t", "tmpfs", "knoc", "/tmp").Run(); err == nil {
		rooms["room"] = "unshare -r -m"
	} else {
		t.Logf("no user namespaces here (%v): not tested with them", err)
	}
	eachShell(t, func(t *testing.T, shell []string) {
		for name, room := range rooms {
			t.Run(name, func(t *testing.T) { test(t, shell, room) })
		}
	})
}

const onePlace = `{volumes: [{name: e, emptyDir: {}}, {name: cm, configMap: {name: cm}}], containers: [{name: c, image: i, volumeMounts: [{name: %, mountPath: /m, subPath: "$"}]}]}`

func onePlaceIn(volume, path string) string {
	return strings.NewReplacer("%", volume, "$", path).Replace(onePlace)
}

func TestPlaces(t *testing.T) {
	t.Parallel()
	const (
		prepare = `failed to prepare subPath for volumeMount "e" of container "c"`
		create  = `failed to create subPath directory for volumeMount "e" of container "c"`
	)
	show := `cd -P run/pod.places/1.0 && ls -A && stat -c %a .`
	for _, tc := range []struct {
		name, volume, path string
		before             string // done in the pod's directory; $1 is outside
		script             string // of the container; show if empty
		want, lost         string
	}{
		{"a directory", "e", "a", "mkdir -m 750 vol/e/a; touch vol/e/a/x", "", "x\n750\n", ""},
		{"a missing one", "e", "a/b c/d", "chmod 2751 vol/e", "", "2751\n", ""},
		{"a file", "e", "a/f", "mkdir vol/e/a; echo text >vol/e/a/f", "cat run/pod.places/1.0; echo more >>run/pod.places/1.0; cat vol/e/a/f", "text\ntext\nmore\n", ""},
		{"a file nobody may read", "e", "f", "mkfifo -m 0 vol/e/f", "stat -Lc %F,%a run/pod.places/1.0", "fifo,0\n", ""},
		{"a link within", "e", "l/x", "mkdir -p vol/e/a/b/x; touch vol/e/a/b/x/y; ln -s a/b vol/e/l", "", "y\n700\n", ""},
		{"an absolute link within", "e", "l", `mkdir vol/e/a; touch vol/e/a/z; ln -s "$PWD/vol/e/a" vol/e/l`, "", "z\n700\n", ""},
		{"a file by links", "e", "l", "mkdir vol/e/a; echo text >vol/e/a/f; ln -s a/f vol/e/k; ln -s ./k vol/e/l", "cat run/pod.places/1.0", "text\n", ""},
		{"the whole volume by a link", "e", "l", "touch vol/e/x; ln -s . vol/e/l", "", "l\nx\n700\n", ""},
		{"a hostile name", "e", "; echo $(id) '", "", "", "700\n", ""},
		{"of a configMap", "cm", "a.conf", "", "cat run/pod.places/1.0; ln -sfn ..2 vol/cm/..data; cat run/pod.places/1.0", "conf\nconf\n", ""},
		{"missing of a configMap", "cm", "gone", "", "", "700\n", ""},

		{"an absolute link", "e", "l", `ln -s "$1/dir" vol/e/l`, "", "", prepare},
		{"an absolute link to a file", "e", "l", `ln -s "$1/key" vol/e/l`, "", "", prepare},
		{"a link upwards", "e", "l", `ln -s ../../../outside/dir vol/e/l`, "", "", prepare},
		{"a link to a neighbour", "e", "l", `mkdir vol/ee; ln -s ../ee vol/e/l`, "", "", prepare},
		{"a link above the volume", "e", "l", `ln -s .. vol/e/l`, "", "", prepare},
		{"a chain of links", "e", "a/l", `mkdir vol/e/a; ln -s ../b vol/e/a/l; ln -s c/../d vol/e/b; mkdir vol/e/c; ln -s "$1" vol/e/d`, "", "", prepare},
		{"a link on the way", "e", "l/dir", `ln -s "$1" vol/e/l`, "", "", prepare},
		{"a missing one behind a link", "e", "l/new", `ln -s "$1" vol/e/l`, "", "", create},
		{"a link into nothing", "e", "l", `ln -s "$1/new" vol/e/l`, "", "", prepare},
		{"a missing one behind a link into nothing", "e", "l/new", `ln -s "$1/new" vol/e/l`, "", "", prepare},
		{"a loop", "e", "l", `ln -s l vol/e/l`, "", "", prepare},
		{"a path through a file", "e", "f/x", `touch vol/e/f`, "", "", prepare},
		{"a process's directory", "e", "l", `ln -s /proc/1/cwd vol/e/l`, "", "", prepare},
		{"a process's root", "e", "l/etc", `ln -s /proc/self/root vol/e/l`, "", "", prepare},
		{"no permission to create", "e", "l/new", `ln -s /proc/1 vol/e/l`, "", "", create},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			eachRoom(t, func(t *testing.T, shell []string, room string) {
				w := newPlaceRun(t, strings.ReplaceAll(onePlaceIn(tc.volume, "@"), `"@"`, string(`"`+tc.path+`"`)))
				w.sh(tc.before)
				script := tc.script
				if script == "" {
					script = show
				}
				out, lost := w.run(shell, room, script)
				if diff := cmp.Diff([]string{tc.want, tc.lost}, []string{out, lost}); diff != "" {
					t.Error(diff)
				}
				w.sh(`[ ! -e "$1/new" ] && [ ! -e "$1/dir/new" ] && [ "$(ls "$1")" = "dir
key" ]`)
				if room != "" {
					w.sh(`[ -z "$(ls run/pod.places)" ]`)
				}
			})
		})
	}
}

// Between the check and the use of a path somebody puts a link in its place.
func TestPlacesSwapped(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, path, before, command, swap, want string }{
		{"a directory before its mount", "d", "mkdir vol/e/d; touch vol/e/d/mine", "mount", `mv vol/e/d vol/e/moved; ln -s "$OUTSIDE" vol/e/d`, "mine\n"},
		{"a file before its mount", "f", "echo mine >vol/e/f", "mount", `rm vol/e/f; ln -s "$OUTSIDE/key" vol/e/f`, ""},
		{"a file after its mount", "f", "echo mine >vol/e/f", "stat", `[ -L vol/e/f ] || { rm vol/e/f; ln -s "$OUTSIDE/key" vol/e/f; }`, ""},
		{"a directory's parent", "a/d", "mkdir -p vol/e/a/d; touch vol/e/a/d/mine", "mount", `mv vol/e/a vol/e/b; mkdir "$OUTSIDE/d"; touch "$OUTSIDE/d/theirs"; ln -s "$OUTSIDE" vol/e/a`, "mine\n"},
		{"a link while a directory is made", "n/m", "", "mkdir", `case $* in *./n) ln -s "$OUTSIDE" vol/e/n ;; esac`, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			eachRoom(t, func(t *testing.T, shell []string, room string) {
				if room == "" && tc.command != "mkdir" {
					return // nothing is mounted there
				}
				if shell[0] == "busybox" {
					return // takes its own commands, whatever PATH says
				}
				w := newPlaceRun(t, onePlaceIn("e", tc.path))
				if tc.before != "" {
					w.sh(tc.before)
				}
				real, err := exec.LookPath(tc.command)
				if err != nil {
					t.Fatal(err)
				}
				writeProgram(t, filepath.Join(w.commands, tc.command), "#!/bin/sh\ncase $* in *tmpfs*) ;; *) (cd "+w.dir+" && { "+tc.swap+"; }) ;; esac\nexec "+real+` "$@"`+"\n")
				out, lost := w.run(shell, room, `PATH=${PATH#*:}; if [ -d run/pod.places/1.0 ]; then ls run/pod.places/1.0; else cat run/pod.places/1.0; fi`)
				if out != tc.want || tc.want == "" && lost == "" {
					t.Errorf("got %q, want %q; message %q", out, tc.want, lost)
				}
			})
		})
	}
}

func TestPlacesNested(t *testing.T) {
	t.Parallel()
	const spec = `
volumes: [{name: e, emptyDir: {}}, {name: cm, configMap: {name: cm}}]
containers:
- name: c
  image: i
  volumeMounts:
  - {name: e, mountPath: /data, subPath: sub}
  - {name: e, mountPath: /data/x/y}
  - {name: cm, mountPath: /data/x/file, subPath: a.conf}
  - {name: e, mountPath: /all}
  - {name: cm, mountPath: /all/etc/conf, subPath: a.conf}
  - {name: e, mountPath: /all/bad/dir, subPath: x}
`
	eachRoom(t, func(t *testing.T, shell []string, room string) {
		w := newPlaceRun(t, spec)
		w.sh(`mkdir vol/e/x; ln -s "$1" vol/e/bad`)
		out, lost := w.run(shell, room, `cd vol/e; find . ! -type l | sort; cat etc/conf`)
		if diff := cmp.Diff([]string{".\n./etc\n./etc/conf\n./sub\n./sub/x\n./sub/x/file\n./sub/x/y\n./x\n", ""}, []string{out, lost}); diff != "" {
			t.Error(diff)
		}
		w.sh(`[ "$(ls "$1")" = "dir
key" ]`)
	})
}

func TestSubPathExpr(t *testing.T) {
	t.Parallel()
	const spec = `{volumes: [{name: e, emptyDir: {}}], containers: [{name: c, image: i, volumeMounts: [{name: e, mountPath: /m, subPathExpr: "$(POD)/$(B)-$$(C)"}]}]}`
	for name, tc := range map[string]struct {
		env        []string
		want, lost string
	}{
		"set":              {[]string{"APPTAINERENV_POD=web-0", "APPTAINERENV_B=it's a b"}, "./web-0/it's a b-$(C)\n", ""},
		"unset":            {[]string{"APPTAINERENV_POD="}, "", "missing value for B, POD"},
		"absolute":         {[]string{"APPTAINERENV_POD=/etc", "APPTAINERENV_B=x"}, "", "error SubPath `/etc/x-$(C)` must not be an absolute path"},
		"up":               {[]string{"APPTAINERENV_POD=..", "APPTAINERENV_B=x"}, "", "unable to provision SubPath `../x-$(C)`: must not contain '..'"},
		"up in the middle": {[]string{"APPTAINERENV_POD=a\n/..", "APPTAINERENV_B=/x"}, "", "unable to provision SubPath `a\n/..//x-$(C)`: must not contain '..'"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachRoom(t, func(t *testing.T, shell []string, room string) {
				w := newPlaceRun(t, spec)
				out, lost := w.run(shell, room, `cd vol/e; find . -type d -links 2`, tc.env...)
				if diff := cmp.Diff([]string{tc.want, tc.lost}, []string{out, lost}); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

// What the journal tells of a container that could not be made, and what becomes
// of that.
func TestPodScriptPlaces(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		pod := scriptPod(v1.RestartPolicyOnFailure, shContainer("a", "echo ran"), shContainer("b", `[ -e run/pod.places/2.0 ] && echo ran`))
		pod.Spec.Volumes = []v1.Volume{{Name: "e"}}
		pod.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "e", MountPath: "/m", SubPath: "l"}}
		pod.Spec.Containers[1].VolumeMounts = []v1.VolumeMount{{Name: "e", MountPath: "/m", SubPath: "d"}}
		w := stageScript(t, newBase(t), pod, nil)
		link := filepath.Join(w.dir, "vol/e/l")
		if err := os.Symlink("/etc", link); err != nil {
			t.Fatal(err)
		}
		w.start(shell, "7")
		w.await("backoff a 0 1")
		if err := os.Remove(link); err != nil {
			t.Fatal(err)
		}
		if code := w.end(); code != 0 {
			t.Errorf("exit code %d; stderr: %s", code, w.stderr.String())
		}
		w.order("start a 0", "message a 0", "unmounted a 0", "exit a 0 128", "backoff a 0 1", "start a 1", "exit a 1 0", "done 0")
		w.order("start b 0", "exit b 0 0", "done 0")
		const text = `failed to prepare subPath for volumeMount "e" of container "a"`
		if got := w.read("msg/a.0"); got != text {
			t.Errorf("the message is %q", got)
		}
		if a, b := w.read("log/a.1"), w.read("log/b.0"); a != "ran\n" || b != "ran\n" {
			t.Errorf("logs %q and %q", a, b)
		}

		journal := parseJournal([]byte(w.read("journal.0")))
		at := slices.IndexFunc(journal, func(e event) bool { return e.Word == "backoff" })
		o := observed{Journal: journal[:at+1], Submitted: true, Job: job{ID: "7", State: "RUNNING"}, Messages: map[string]string{"a.0": text}}
		state := fold(pod, o).ContainerStatuses[0].State
		if state.Waiting == nil || state.Waiting.Reason != "CreateContainerConfigError" || state.Waiting.Message != text {
			t.Errorf("state %+v", state)
		}
		var told []string
		for _, list := range eventsOf(pod, &o, journal, 0) {
			for _, e := range list {
				if e.reason == "Failed" {
					told = append(told, e.container+": "+e.message)
				}
			}
		}
		if diff := cmp.Diff([]string{"a: Error: " + text}, told); diff != "" {
			t.Error(diff)
		}
	})
}
