package knoc

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestScripts keeps what the templates of the login node become with hostile
// values in testdata/scripts, where they are read by people, by shellcheck (make
// lint) and, here, by each shell. pod.sh and run/enter.sh have goldens of their own.
func TestScripts(t *testing.T) {
	const nasty = `it's "$(id)" \`
	dir, epoch := "/home/hpcuser/.knoc/knoc-c1", "1000000001"
	type pod struct{ UID, Action string }
	data := map[string]any{
		"prologue":      struct{ Nonce string }{"@NONCE"},
		"start":         map[string]any{"Node": "knoc", "Root": "~/my dir", "Base": "knoc-c1"},
		"submit":        map[string]any{"Dir": dir, "Epoch": epoch, "Pods": []pod{{"u-1", actionSubmit}, {nasty, actionSeal}}, "Suffix": ".new-RANDOM", "Parallel": 4, "SbatchSeconds": 60, "LockSeconds": 120},
		"slurm":         map[string]any{"Seconds": 60, "Words": []string{"squeue", "--noheader", "--format=" + squeueFormat, nasty}, "Fenced": false, "Images": "/home/u/images"},
		"stop":          map[string]any{"Dir": dir, "Epoch": epoch, "Commands": []command{{"u-1", "12", "stop", "-", 30, true}}, "Cancel": []string{"13"}, "Pending": []string{"14", nasty}, "Park": []parkedJob{{"16", false}}, "Release": []parkedJob{{"17", false}, {nasty, true}}, "Suffix": ".new-RANDOM", "Changes": []change{{UID: "u-2", JobID: "15", Runs: true, Commands: []command{{Verb: "update", Container: "main", Number: 2}, {Verb: "add", Container: "debugger", Number: 3}}}, {UID: nasty, JobID: nasty}}},
		"remove":        map[string]any{"Dir": dir, "Epoch": epoch, "UIDs": []string{"u-1", nasty}},
		"heal":          map[string]any{"Node": "knoc", "Root": "/home/u/my dir", "Base": "knoc-c1"},
		"adopt":         map[string]any{"Dir": dir, "Epoch": epoch, "Jobs": []struct{ UID, JobID string }{{"u-1", "12"}, {nasty, nasty}}},
		"pull":          pullScript{nasty, "APPTAINER_", 120, 1024},
		"watch":         map[string]any{"Dir": dir, "Epoch": epoch},
		"exec":          execData{JobID: "12", Step: "knoc-exec-1", Mark: "@MARK", Words: []string{dir + "/u-1/run/enter.sh", "main", "--", "sh", "-c", nasty}},
		"usage":         map[string]any{"Dir": dir},
		"relay":         struct{}{},
		"execcancel":    execData{JobID: "12", Step: "knoc-exec-1"},
		"logs":          logData{File: dir + "/u-1/log/main.0", Tail: "10", Ago: 60, Stamps: true, Index: 24},
		"classicstage":  map[string]any{"Dir": dir, "Epoch": epoch, "Instance": "default-u-1-main", "New": "default-u-1-main.new-X", "Pod": "default-u-1", "Shared": []string{"data"}},
		"classicdelete": map[string]any{"Dir": dir, "Epoch": epoch, "Instance": "default-u-1-main", "Pod": "default-u-1", "Job": "knoc-default-u-1-main", "Seconds": 45},
	}
	probes, err := newProbeScript(probedPod(), dir+"/u-1")
	if err != nil {
		t.Fatal(err)
	}
	data["probe"] = probes
	hosted := []hostVolume{{Volume: "data", Base: "/data", Path: nasty, Shown: "/data/" + nasty, Type: "any"}}
	if data["places"], err = newPodScript(placesPod(t), scriptConfig{Dir: dir + "/u-1", Hosted: hosted, HostPaths: []string{"/data"}}); err != nil {
		t.Fatal(err)
	}
	data["refresh"] = refreshData{7, []refreshed{{"v", "..0123456789abcdef", false}, {nasty, nasty, true}}, scratchData{Mapped: true, FSGroup: "1234"}}
	names, err := fs.Glob(templateFS, "templates/*.sh.tmpl")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range names {
		name := strings.TrimSuffix(filepath.Base(file), ".sh.tmpl")
		if name == "pod" || name == "enter" || name == "fence" {
			continue // goldens of their own; part of the others
		}
		t.Run(name, func(t *testing.T) {
			if data[name] == nil {
				t.Fatalf("%s has no data here: add some", file)
			}
			text, err := render(name+".sh.tmpl", data[name])
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", "scripts", name+".sh")
			if *update {
				if err := os.WriteFile(golden, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if text != string(want) {
				t.Errorf("%s is not what %s becomes; go test -run TestScripts -update . writes it, git diff shows it", golden, file)
			}
			for _, sh := range testShells(t) {
				if out, err := exec.Command(sh[0], append(sh[1:], "-n", golden)...).CombinedOutput(); err != nil {
					t.Errorf("%v -n %s: %v\n%s", sh, golden, err, out)
				}
			}
		})
	}
}
