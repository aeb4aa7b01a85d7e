package knoc

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What becomes the runtime has exactly the values, whatever the shell, and on no
// command line. What a variable is called makes the difference between its ways.
func TestEnvFileThroughShells(t *testing.T) {
	t.Parallel()
	plain := []envVar{
		{Name: "EMPTY"},
		{Name: "NASTY", Value: []valuePart{{Text: " \t'\"`id` $(id) ${HOME} $$ \\n\\\n\r\x01é\n\n "}}},
		{Name: "BIG", Value: []valuePart{{Text: strings.Repeat("x$(id)\n", 100<<10/7)}}},
		{Name: "HOME", Value: []valuePart{{Text: "/da ta"}}},
		{Name: "IP", Value: []valuePart{{Text: "http://"}, {Var: varPodIP}, {Text: "/"}}},
	}
	odd := []envVar{
		{Name: "a.b", Value: []valuePart{{Text: "dot", Secret: true}}},
		{Name: "a-b", Value: plain[1].Value},
		{Name: "3 '\"`$(id)~", Value: []valuePart{{Text: "3"}}},
		{Name: "CRLF", Value: []valuePart{{Text: "a\r"}, {Text: "\nb", Secret: true}}},
		{Name: "UID", Value: []valuePart{{Text: "77"}}},
		{Name: "b.ip", Value: []valuePart{{Var: varPodIP}}},
	}
	want := func(vars []envVar, prefix string) []string {
		var list []string
		for _, v := range vars {
			name, value := prefix+v.Name, ""
			if v.Name == homeVar {
				name = "APPTAINER_HOME"
				list = append(list, "APPTAINER_NO_HOME=1")
			}
			for _, p := range v.Value {
				value += p.Text
				if p.Var != "" {
					value += "192.0.2.1"
				}
			}
			list = append(list, name+"="+value)
		}
		return list
	}
	for _, tc := range []struct {
		name  string
		vars  []envVar
		tools []string
		want  []string // nil: it does not run
	}{
		{"plain", plain, nil, append(want(plain, "APPTAINERENV_"), "LEAK=1", "TMPDIR=/t")},
		{"perl", slices.Concat(plain, odd), []string{"perl"}, slices.Concat(want(plain, "APPTAINERENV_"), want(odd, ""), []string{"APPTAINER_TMPDIR=/t", "APPTAINERENV_USER_PATH="})},
		{"python3", slices.Concat(plain, odd), []string{"python3"}, slices.Concat(want(plain, "APPTAINERENV_"), want(odd, ""), []string{"APPTAINER_TMPDIR=/t", "APPTAINERENV_USER_PATH="})},
		{"users", plain[3:4], []string{"perl"}, []string{"APPTAINER_HOME=/da ta", "APPTAINER_NO_HOME=1", "APPTAINERENV__;export HOME=/da ta", "APPTAINER_TMPDIR=/t", "APPTAINERENV_USER_PATH="}},
		{"neither", odd, nil, nil},
	} {
		bin := t.TempDir()
		for _, tool := range tc.tools {
			path, err := exec.Command(tool, map[string][]string{"perl": {"-e", "print $^X"}, "python3": {"-c", "import sys; print(sys.executable, end='')"}}[tool]...).Output()
			if err != nil {
				if os.Getenv("KNOC_TEST_SHELLS") != "" {
					t.Fatalf("%s: %v", tool, err)
				}
				t.Skipf("%s: %v", tool, err)
			}
			if err := os.Symlink(string(path), filepath.Join(bin, tool)); err != nil {
				t.Fatal(err)
			}
		}
		cat, err := exec.LookPath("cat")
		if err != nil {
			t.Fatal(err)
		}
		for _, sh := range testShells(t) {
			t.Run(tc.name+" "+sh[0], func(t *testing.T) {
				dir := t.TempDir()
				body, err := envFile(tc.vars, "", tc.name == "users")
				if err != nil {
					t.Fatal(err)
				}
				helpers, err := envHelpers(body)
				if err != nil {
					t.Fatal(err)
				}
				writeFiles(t, dir, append(append([]file{{Name: "env", Mode: fs.ModeDir | 0o700}, {Name: "run", Mode: fs.ModeDir | 0o700}}, helpers...), file{Name: "env/c", Mode: 0o600, Body: body}))
				run := func(words string) (string, string, error) {
					shell, err := exec.LookPath(sh[0])
					if err != nil {
						t.Fatal(err)
					}
					c := exec.Command(shell, append(slices.Clone(sh[1:]), "-c", `carry=''; holder=1; . ./env/c || exit 125; exec $carry `+words)...)
					c.Dir = dir
					c.Env = []string{"PATH=" + bin, "LEAK=1", "TMPDIR=/t", varPodIP + "=192.0.2.1"}
					var out, errs bytes.Buffer
					c.Stdout, c.Stderr = &out, &errs
					err = c.Run()
					return out.String(), errs.String(), err
				}
				out, errs, err := run(cat + " /proc/self/environ")
				if tc.want == nil {
					if err == nil || !strings.Contains(errs, "neither perl nor python3") || !strings.Contains(errs, "a.b, a-b") {
						t.Fatalf("it ran, or does not say why not: %v %q", err, errs)
					}
					return
				}
				if err != nil {
					t.Fatal(err, errs)
				}
				var got []string
				for _, entry := range strings.Split(strings.TrimSuffix(out, "\x00"), "\x00") {
					switch name, _, _ := strings.Cut(entry, "="); name {
					case "PATH", "PWD", "OLDPWD", "SHLVL", "_", varPodIP: // the shell's, and the script's
					default:
						got = append(got, entry)
					}
				}
				slices.Sort(got)
				expected := slices.Sorted(slices.Values(tc.want))
				if diff := cmp.Diff(expected, got); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				out, errs, err = run(cat + " -- /proc/self/cmdline --containall 2>/dev/null")
				if words := strings.Split(out, "\x00"); len(tc.tools) > 0 && (!slices.Contains(words, "--pid") || slices.Contains(words, "--containall") || strings.Contains(out, "dot")) {
					t.Errorf("the command line is %q: %v %s", words, err, errs)
				}
			})
		}
	}
}

// What enters a container takes those names from its first program.
func TestEnvFromProcess(t *testing.T) {
	t.Parallel()
	for _, tool := range []string{"perl", "python3"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
		first := exec.Command("sleep", "100")
		first.Env = []string{"a.b=1\n2", "A=not", "UID=7", "PYTHONPATH=p", "x-y=", "PATH=/nowhere"}
		if err := first.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { first.Process.Kill(); first.Wait() }()
		script := map[string]string{"perl": "templates/env.pl", "python3": "templates/env.py"}[tool]
		c := exec.Command("sh", "-c", `exec "$0" "$1" "$2" /none /bin/cat /proc/self/environ`, tool, script, strconv.Itoa(first.Process.Pid))
		c.Env = []string{"PATH=" + os.Getenv("PATH"), "B=keep"}
		c.Stderr = os.Stderr
		out, err := c.Output()
		if err != nil {
			t.Fatal(tool, err)
		}
		list := strings.Split(string(out), "\x00")
		for _, entry := range []string{"a.b=1\n2", "UID=7", "PYTHONPATH=p", "x-y=", "B=keep"} {
			if !slices.Contains(list, entry) {
				t.Errorf("%s: no %q in %q", tool, entry, list)
			}
		}
		if slices.Contains(list, "A=not") || slices.Contains(list, "PATH=/nowhere") {
			t.Errorf("%s: a name of a shell's came too: %q", tool, list)
		}
	}
}
