package knoc

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"
)

// flagsAnnotation holds more sbatch options for a pod's job.
const flagsAnnotation = "slurm-job.knoc.io/flags"

// requeueAnnotation set to "true" lets Slurm run a pod's job again, after a
// node's failure, a preemption, or when an operator says so.
const requeueAnnotation = "slurm-job.knoc.io/requeue"

func mayRequeue(pod *v1.Pod) bool { return pod.Annotations[requeueAnnotation] == "true" }

// sbatchOptions are the options of a pod's job, each a whole one in the form
// for an #SBATCH line of its own.
func sbatchOptions(pod *v1.Pod, partition string) ([]string, error) {
	// sbatch reads #PBS and #BSUB lines anywhere in a script, also within the
	// quoted text of a container's arguments: they are not to be looked at.
	options := []string{
		"--ignore-pbs",
		"--job-name=" + jobPrefix + string(pod.UID),
		"--comment=" + pod.Namespace + "/" + pod.Name,
		"--nodes=1",
		"--ntasks=1",
	}
	if partition != "" {
		options = append(options, "--partition="+partition)
	}
	requests := podRequests(pod)
	// Value rounds up. Slurm gives whole CPUs.
	options = append(options, fmt.Sprintf("--cpus-per-task=%d", max(1, requests.Cpu().Value())))
	// --mem=0 means a node's whole memory (sbatch(1)), so it is never printed: a
	// pod that asks for none gets the site's default.
	if bytes := requests.Memory().Value(); bytes > 0 {
		options = append(options, fmt.Sprintf("--mem=%dM", (bytes-1)>>20+1))
	}
	nvidia, amd := requests[nvidiaGPU], requests[amdGPUs]
	if !nvidia.IsZero() && !amd.IsZero() {
		return nil, refuse("UnsupportedResources", "the pod asks for %s and for %s: a job can have GPUs of one maker only", nvidiaGPU, amdGPUs)
	}
	if gpus := nvidia.Value() + amd.Value(); gpus > 0 {
		options = append(options, fmt.Sprintf("--gres=gpu:%d", gpus))
	}
	if deadline := pod.Spec.ActiveDeadlineSeconds; deadline != nil {
		// The job itself ends at the deadline; Slurm's limit is the net below,
		// past the grace period and a minute to start and to end.
		seconds := *deadline + gracePeriod(pod) + 60
		options = append(options, fmt.Sprintf("--time=%d", (seconds+59)/60))
	}
	more, err := parseFlags(pod.Annotations[flagsAnnotation])
	if err != nil {
		return nil, err
	}
	// Before a time limit pod.sh is told, in time for the grace period and for a
	// journal with an end. A limit that is made from the deadline is never met.
	if pod.Spec.ActiveDeadlineSeconds == nil || slices.ContainsFunc(more, func(o string) bool { return strings.HasPrefix(o, "--time=") }) {
		options = append(options, fmt.Sprintf("--signal=B:ALRM@%d", min(gracePeriod(pod)+15, math.MaxUint16)))
	}
	// A later option overrides an earlier one.
	options = append(options, more...)
	for i, o := range options {
		options[i] = sbatchQuote(o)
	}
	return options, nil
}

// longestGrace is ten years: the API takes any number, which then overflows here
// or in the shell.
const longestGrace = 10 * 365 * 24 * 3600

// gracePeriod is the pod's own, or the API server's default.
func gracePeriod(pod *v1.Pod) int64 {
	if s := pod.Spec.TerminationGracePeriodSeconds; s != nil {
		return min(*s, longestGrace)
	}
	return v1.DefaultTerminationGracePeriodSeconds
}

// podRequests are the scheduler's: the sum over containers, or the most that an
// init container needs. A container's limit stands in for a request it lacks,
// as the API server defaults it.
func podRequests(pod *v1.Pod) v1.ResourceList {
	pod = pod.DeepCopy()
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			r := &list[i].Resources
			for name, limit := range r.Limits {
				if _, ok := r.Requests[name]; !ok {
					if r.Requests == nil {
						r.Requests = v1.ResourceList{}
					}
					r.Requests[name] = limit
				}
			}
		}
	}
	return resource.PodRequests(pod, resource.PodResourcesOptions{})
}

// sbatchQuote writes an option so that sbatch's own reader of #SBATCH lines
// gives it back: double quotes keep spaces, a backslash keeps the next
// character, and # begins a comment, in old versions even within quotes.
func sbatchQuote(option string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_=./:,@%+*[]", r)
	}
	if strings.IndexFunc(option, func(r rune) bool { return !plain(r) }) < 0 {
		return option
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `#`, `\#`).Replace(option) + `"`
}

// shortFlags are sbatch's one-letter options and their long names; those in
// bareFlags take no value.
var shortFlags = map[byte]string{
	'A': "account", 'B': "extra-node-info", 'C': "constraint", 'D': "chdir", 'F': "nodefile", 'G': "gpus",
	'H': "hold", 'J': "job-name", 'L': "licenses", 'M': "clusters", 'N': "nodes", 'O': "overcommit", 'Q': "quiet",
	'S': "core-spec", 'V': "version", 'W': "wait", 'a': "array", 'b': "begin", 'c': "cpus-per-task", 'd': "dependency",
	'e': "error", 'h': "help", 'i': "input", 'k': "no-kill", 'm': "distribution", 'n': "ntasks", 'o': "output",
	'p': "partition", 'q': "qos", 's': "oversubscribe", 't': "time", 'u': "usage", 'v': "verbose", 'w': "nodelist", 'x': "exclude",
}

const bareFlags = "HOQVWhksuv"

// ownedFlags are knoc's to set, or would break what knoc relies on: where the
// job is found and writes, how often it runs, and what sbatch prints.
var ownedFlags = []string{
	"array", "chdir", "clusters", "comment", "error", "export", "export-file", "external", "get-user-env", "gid", "help",
	"ignore-pbs", "input", "job-name", "no-requeue", "open-mode", "output", "parsable", "quiet", "requeue",
	"signal", "test-only", "uid", "usage", "verbose", "version", "wait", "wrap",
}

// parseFlags reads the annotation's text into options of the form --long or
// --long=value.
func parseFlags(text string) ([]string, error) {
	words, err := shellWords(text)
	if err != nil {
		return nil, refuse("InvalidSlurmFlags", "annotation %s: %v", flagsAnnotation, err)
	}
	var options []string
	for i := 0; i < len(words); i++ {
		w := words[i]
		name, value, hasValue := strings.Cut(strings.TrimPrefix(w, "--"), "=")
		if !strings.HasPrefix(w, "--") {
			if len(w) < 2 || w[0] != '-' || shortFlags[w[1]] == "" {
				return nil, refuse("InvalidSlurmFlags", "annotation %s: %q is no option of sbatch; write --name=value or -x value", flagsAnnotation, w)
			}
			name, value = shortFlags[w[1]], w[2:]
			hasValue = strings.IndexByte(bareFlags, w[1]) < 0
			switch {
			case !hasValue && value != "":
				return nil, refuse("InvalidSlurmFlags", "annotation %s: -%c takes no value, found %q; write one option a word", flagsAnnotation, w[1], w)
			case hasValue && value == "" && i+1 == len(words):
				return nil, refuse("InvalidSlurmFlags", "annotation %s: %s lacks its value", flagsAnnotation, w)
			case hasValue && value == "":
				i++
				value = words[i]
			}
		}
		if !longName.MatchString(name) {
			return nil, refuse("InvalidSlurmFlags", "annotation %s: %q is no option of sbatch; write --name=value or -x value", flagsAnnotation, w)
		}
		for _, owned := range ownedFlags {
			// getopt_long(3) takes any beginning of a name that is not ambiguous.
			if strings.HasPrefix(owned, name) {
				return nil, refuse("InvalidSlurmFlags", "annotation %s: %s is not a pod's to set (--%s is knoc's own); leave it out", flagsAnnotation, w, owned)
			}
		}
		if hasValue {
			name += "=" + value
		}
		options = append(options, "--"+name)
	}
	return options, nil
}

var longName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]+$`)

// shellWords splits text as a shell does (POSIX.1-2017, Shell Command Language,
// 2.2 and 2.6.5), without expanding anything. Control characters are refused:
// an option has to stay on its #SBATCH line.
func shellWords(text string) ([]string, error) {
	text = strings.TrimSpace(text)
	if i := strings.IndexFunc(text, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }); i >= 0 {
		return nil, fmt.Errorf("a newline or another control character after %q; write all options on one line", text[:i])
	}
	var words []string
	var word []byte
	inWord, quoted := false, byte(0)
	for i := 0; i < len(text); i++ {
		c := text[i]
		switch {
		case quoted == '\'' && c != '\'', quoted == '"' && c != '"' && c != '\\':
			word = append(word, c)
		case quoted != 0 && c == quoted:
			quoted = 0
		case quoted == 0 && (c == '\'' || c == '"'):
			quoted, inWord = c, true
		case c == '\\':
			if i++; i == len(text) {
				return nil, fmt.Errorf("a backslash at the end of %q", text)
			}
			if quoted == '"' && !strings.ContainsRune("$`\"\\", rune(text[i])) {
				word = append(word, c)
			}
			word, inWord = append(word, text[i]), true
		case c == ' ' || c == '\t':
			if inWord {
				words, word, inWord = append(words, string(word)), nil, false
			}
		default:
			word, inWord = append(word, c), true
		}
	}
	if quoted != 0 {
		return nil, fmt.Errorf("an unclosed %c in %q", quoted, text)
	}
	if inWord {
		words = append(words, string(word))
	}
	for _, w := range words {
		if strings.Contains(w, "\t") {
			return nil, fmt.Errorf("a tab within %q", w)
		}
	}
	return words, nil
}
