package knoc

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func quantities(kv ...string) v1.ResourceList {
	list := v1.ResourceList{}
	for i := 0; i < len(kv); i += 2 {
		list[v1.ResourceName(kv[i])] = resource.MustParse(kv[i+1])
	}
	return list
}

// asking is a container with requests; a second list are its limits.
func asking(lists ...v1.ResourceList) v1.Container {
	c := v1.Container{Resources: v1.ResourceRequirements{Requests: lists[0]}}
	if len(lists) > 1 {
		c.Resources.Limits = lists[1]
	}
	return c
}

func TestSbatchOptions(t *testing.T) {
	always := v1.ContainerRestartPolicyAlways
	sidecar := asking(quantities("cpu", "1", "memory", "1Gi"))
	sidecar.RestartPolicy = &always
	for name, c := range map[string]struct {
		spec  v1.PodSpec
		flags string
		want  []string // after the five that every job has
	}{
		"nothing asked": {
			spec: v1.PodSpec{Containers: []v1.Container{{}}},
			want: []string{"--cpus-per-task=1"},
		},
		"sum, rounded up": {
			spec: v1.PodSpec{Containers: []v1.Container{
				asking(quantities("cpu", "1500m", "memory", "1000001")), asking(quantities("cpu", "600m", "memory", "512Mi")),
			}},
			want: []string{"--cpus-per-task=3", "--mem=513M"},
		},
		"never zero": {
			spec: v1.PodSpec{Containers: []v1.Container{asking(quantities("cpu", "1m", "memory", "1"))}},
			want: []string{"--cpus-per-task=1", "--mem=1M"},
		},
		"zero asked": {
			spec: v1.PodSpec{Containers: []v1.Container{asking(quantities("cpu", "0", "memory", "0"))}},
			want: []string{"--cpus-per-task=1"},
		},
		"init container asks for more": {
			spec: v1.PodSpec{
				InitContainers: []v1.Container{asking(quantities("cpu", "4", "memory", "64Mi"))},
				Containers:     []v1.Container{asking(quantities("cpu", "1", "memory", "128Mi"))},
			},
			want: []string{"--cpus-per-task=4", "--mem=128M"},
		},
		"sidecar": {
			spec: v1.PodSpec{InitContainers: []v1.Container{sidecar}, Containers: []v1.Container{asking(quantities("cpu", "1"))}},
			want: []string{"--cpus-per-task=2", "--mem=1024M"},
		},
		"limits stand in": {
			spec: v1.PodSpec{Containers: []v1.Container{
				asking(nil, quantities("cpu", "2", "memory", "10M")), asking(quantities("cpu", "1"), quantities("cpu", "9")),
			}},
			want: []string{"--cpus-per-task=3", "--mem=10M"},
		},
		"gpus and deadline": {
			spec: v1.PodSpec{
				Containers:                    []v1.Container{asking(nil, quantities("nvidia.com/gpu", "2"))},
				ActiveDeadlineSeconds:         new(int64(61)),
				TerminationGracePeriodSeconds: new(int64(0)),
			},
			want: []string{"--cpus-per-task=1", "--gres=gpu:2", "--time=3"},
		},
		"other gpus, default grace, longest deadline": {
			spec: v1.PodSpec{Containers: []v1.Container{asking(nil, quantities("amd.com/gpu", "1"))}, ActiveDeadlineSeconds: new(int64(1<<31 - 1))},
			want: []string{"--cpus-per-task=1", "--gres=gpu:1", "--time=35791396"},
		},
		"whole minutes": {
			spec: v1.PodSpec{Containers: []v1.Container{{}}, ActiveDeadlineSeconds: new(int64(90))},
			want: []string{"--cpus-per-task=1", "--time=3"},
		},
		"flags": {
			spec:  v1.PodSpec{Containers: []v1.Container{{}}},
			flags: ` --constraint="a b" -t 10 -N2 -H --exclude='x#y\z"' --qos=high --wait-all-nodes=1` + "\n",
			want: []string{
				"--cpus-per-task=1", `"--constraint=a b"`, "--time=10", "--nodes=2", "--hold", `"--exclude=x\#y\\z\""`, "--qos=high", "--wait-all-nodes=1",
			},
		},
	} {
		pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "u-1", Namespace: "ns", Name: "p.q"}, Spec: c.spec}
		if c.flags != "" {
			pod.Annotations = map[string]string{flagsAnnotation: c.flags}
		}
		before := pod.DeepCopy()
		got, err := sbatchOptions(pod, "batch")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		signal := slices.IndexFunc(got, func(o string) bool { return strings.HasPrefix(o, "--signal=") })
		if c.spec.ActiveDeadlineSeconds != nil && signal >= 0 || c.spec.ActiveDeadlineSeconds == nil && (signal < 0 || got[signal] != "--signal=B:ALRM@45") {
			t.Errorf("%s: %q; want --signal=B:ALRM@45 where the time limit is the site's", name, got)
		}
		if signal >= 0 {
			got = slices.Delete(got, signal, signal+1)
		}
		head := []string{"--ignore-pbs", "--job-name=knoc-u-1", "--comment=ns/p.q", "--nodes=1", "--ntasks=1", "--partition=batch"}
		if d := cmp.Diff(slices.Concat(head, c.want), got); d != "" {
			t.Fatalf("%s: %s", name, d)
		}
		if d := cmp.Diff(before, pod); d != "" {
			t.Fatalf("%s: the pod was changed: %s", name, d)
		}
	}
}

func TestSbatchOptionsRefused(t *testing.T) {
	both := asking(nil, quantities("nvidia.com/gpu", "1", "amd.com/gpu", "1"))
	_, err := sbatchOptions(&v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{both}}}, "")
	var r *refusal
	if !errors.As(err, &r) || r.Reason != "UnsupportedResources" {
		t.Fatalf("GPUs of two makers gave %v", err)
	}
	for flags, want := range map[string]string{
		"--output=/tmp/x":       "--output is knoc's own",
		"-o /tmp/x":             "--output is knoc's own",
		"--outp=/tmp/x":         "--output is knoc's own", // getopt_long takes beginnings
		"--wr=x":                "--wrap is knoc's own",
		"-a1-4":                 "--array is knoc's own",
		"--uid=0":               "--uid is knoc's own",
		"-J x":                  "--job-name is knoc's own",
		"--requeue":             "--requeue is knoc's own",
		"--no-r":                "--no-requeue is knoc's own",
		"--job=x":               "--job-name is knoc's own",
		"--signal=B:TERM@60":    "--signal is knoc's own",
		"-W":                    "--wait is knoc's own",
		"--export=ALL":          "--export is knoc's own",
		"-M other":              "--clusters is knoc's own",
		"--time 10":             `"10" is no option`,
		"job.sh":                `"job.sh" is no option`,
		":":                     `":" is no option`,
		"-":                     `"-" is no option`,
		"--":                    `"--" is no option`,
		"--=x":                  `"--=x" is no option`,
		"---x":                  `"---x" is no option`,
		"-Z 1":                  `"-Z" is no option`,
		"-Hs":                   "-H takes no value",
		"-t":                    "-t lacks its value",
		"--time=1\n--nodes=2":   "newline",
		"--time=1\r--nodes=2":   "control character",
		"--time='1":             "an unclosed '",
		`--time="1`:             `an unclosed "`,
		`--time=1\`:             "a backslash at the end",
		"--constraint='a\tb'":   "a tab within",
		"--Time=1":              "no option",
		"--time=1 ''":           `"" is no option`,
		"--constraint=x\x00y":   "control character",
		"--nodes=1 #SBATCH":     `"#SBATCH" is no option`,
		"--time=1 & --nodes=2":  `"&" is no option`,
		"--tasks_per_node=1":    "no option",
		"--comment=other/pod":   "--comment is knoc's own",
		"--open-mode=append":    "--open-mode is knoc's own",
		"--chdir=/":             "--chdir is knoc's own",
		"--ignore-pbs":          "--ignore-pbs is knoc's own",
		"--test-only --nodes=2": "--test-only is knoc's own",
	} {
		pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{flagsAnnotation: flags}}}
		_, err := sbatchOptions(pod, "")
		var r *refusal
		if !errors.As(err, &r) || r.Reason != "InvalidSlurmFlags" || !strings.Contains(r.Message, want) {
			t.Errorf("%q gave %v, want %q", flags, err, want)
		}
	}
}

func TestShellWords(t *testing.T) {
	for text, want := range map[string][]string{
		"":                     nil,
		"  a\t b  ":            {"a", "b"},
		`a'b c'"d e"f`:         {"ab cd ef"},
		`'it'\''s' "\$\x\"\\"`: {"it's", `$\x"\`},
		`\a\ b '' ""`:          {"a b", "", ""},
		`'\"'`:                 {`\"`},
		"é'ü'":                 {"éü"},
	} {
		got, err := shellWords(text)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
}

// sbatchRead reads an #SBATCH line as sbatch does: double quotes keep blanks, a
// backslash keeps the next character, also in quotes, and # begins a comment,
// where old versions do not look whether it is in quotes. Seen with sbatch
// --test-only -vvvvvv of 22.05 and 26.05.
func sbatchRead(line string, old bool) []string {
	var words []string
	var word []rune
	escaped, quoted := false, rune(0)
	for _, r := range line + " " {
		switch {
		case escaped:
			word, escaped = append(word, r), false
		case r == '\\':
			escaped = true
		case r == '#' && (old || quoted == 0):
			return append(words, string(word))
		case r == quoted && quoted != 0:
			quoted = 0
		case quoted == 0 && (r == '"' || r == '\'' && !old):
			quoted = r
		case r == ' ' && quoted == 0:
			if len(word) > 0 {
				words, word = append(words, string(word)), nil
			}
		default:
			word = append(word, r)
		}
	}
	return words
}

func TestSbatchQuote(t *testing.T) {
	for _, s := range []string{
		"--mem=5M", "--x=", `--x=a b#c\d"e'f$g` + "`h!~é", `--x=\`, `--x=\\"`, "--x=#", "--x=' '", "--x=  ", "--x=[a*2&b]|c(x);>", "--x=n[1-2,4]%3",
	} {
		for _, old := range []bool{true, false} {
			if got := sbatchRead(sbatchQuote(s), old); len(got) != 1 || got[0] != s {
				t.Errorf("%q is written %s and read (old %v) as %q", s, sbatchQuote(s), old, got)
			}
		}
	}
}
