package knoc

import (
	"fmt"
	"path"
	"regexp"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// scriptConfig is what newPodScript needs to know beyond the pod.
type scriptConfig struct {
	// Dir is the absolute path of the pod's directory on the cluster.
	Dir string
	// Runtime is apptainer or singularity, by name or by path; "" is apptainer.
	Runtime string
	// InsecureRegistries are the registries, as host or host:port, that speak
	// plain HTTP.
	InsecureRegistries []string
	// Options are whole sbatch options, one for each #SBATCH line (sbatchOptions).
	Options []string
	// WritableRoot is where a container's own files go: scratch, memory or none;
	// "" is scratch.
	WritableRoot string
	// WithoutSubIDs is what becomes of a pod with users of its own where there are
	// no subordinate ids: refuse or ignore; "" is refuse.
	WithoutSubIDs string
	// ClusterDomain ends the host names of pods with a subdomain; "" is
	// cluster.local.
	ClusterDomain string
	// BackoffSeconds is the wait before a container's first restart; 0 is the
	// kubelet's 10.
	BackoffSeconds int
}

// podScript is the data of pod.sh.tmpl, the script that is a pod's job, and of
// enter.sh.tmpl. What stands outside of quotes there was checked by
// newPodScript to be a plain name, path or number.
type podScript struct {
	Namespace, Name, UID string
	Dir                  string
	RuntimeName          string
	Options              []string
	Grace                int64
	Backoff              int
	InitPolicy, Policy   v1.RestartPolicy
	Init, Containers     []scriptContainer
	scratchData
}

// scriptContainer is one container of a podScript. Number counts from 1 through
// the init containers and then the others.
type scriptContainer struct {
	Number int
	Name   string
	Argv   [][]word
	Fresh  bool   // something of it is on the node's scratch
	Enter  []word // how run/enter becomes the container's user (enterAs)
	User   word
	Pull   []word // brings the image into the runtime's cache; nil for a file
}

// plainText matches what may stand in a script outside of quotes. It has no
// character that means anything to a shell, and no newline, which would end a
// comment.
var plainText = regexp.MustCompile(`^[A-Za-z0-9._/@+~-]+$`)

// sbatchOption matches a whole option as sbatchOptions writes it, with quotes
// around one that needs them. It has no control character: a newline would begin
// a line of the script.
var sbatchOption = regexp.MustCompile(`^(--[a-z0-9][a-z0-9-]+(=[^\x00-\x1f\x7f"]*)?|"--[a-z0-9][a-z0-9-]+(=[^\x00-\x1f\x7f]*)?")$`)

// newPodScript makes the script of a pod that checkPod found no fault with.
func newPodScript(pod *v1.Pod, cfg scriptConfig) (*podScript, error) {
	if cfg.Runtime == "" {
		cfg.Runtime = "apptainer"
	}
	s := &podScript{
		Namespace:   pod.Namespace,
		Name:        pod.Name,
		UID:         string(pod.UID),
		Dir:         cfg.Dir,
		RuntimeName: path.Base(cfg.Runtime),
		Options:     cfg.Options,
		Grace:       max(0, gracePeriod(pod)),
		Backoff:     cfg.BackoffSeconds,
		InitPolicy:  v1.RestartPolicyOnFailure,
		Policy:      pod.Spec.RestartPolicy,
	}
	s.scratchData = scratchOf(pod, cfg)
	if s.Backoff == 0 {
		s.Backoff = 10
	}
	if s.Policy == "" {
		s.Policy = v1.RestartPolicyAlways // the API's default
	}
	if s.Policy == v1.RestartPolicyNever {
		s.InitPolicy = v1.RestartPolicyNever
	}
	if !strings.HasPrefix(cfg.Dir, "/") {
		return nil, fmt.Errorf("the pod's directory %q is not an absolute path", cfg.Dir)
	}
	plain := map[string]string{
		"namespace": s.Namespace, "name": s.Name, "uid": s.UID, "directory": s.Dir,
		"runtime": cfg.Runtime, "restart policy": string(s.Policy),
	}
	for _, c := range allContainers(pod) {
		plain["container name "+c.Name] = c.Name
	}
	if s.HostName != "" {
		plain["host name"] = s.HostName
	}
	for what, text := range plain {
		if !plainText.MatchString(text) {
			return nil, fmt.Errorf("the pod's script cannot be written: the %s %q has a character other than letters, digits and . _ / @ + ~ -", what, text)
		}
	}
	for _, o := range s.Options {
		if !sbatchOption.MatchString(o) {
			return nil, fmt.Errorf("the pod's script cannot be written: %q is not one option of sbatch on one line", o)
		}
	}
	for i, c := range allContainers(pod) {
		argv, err := runtimeArgv(pod, c, cfg)
		if err != nil {
			return nil, err
		}
		pull, err := pullArgv(c, cfg)
		if err != nil {
			return nil, err
		}
		sc := scriptContainer{Number: i + 1, Name: c.Name, Argv: argv, Pull: pull, Fresh: s.Mapped || s.has(c.Name)}
		sc.Enter, sc.User = enterAs(pod, c)
		if i < len(pod.Spec.InitContainers) {
			s.Init = append(s.Init, sc)
		} else {
			s.Containers = append(s.Containers, sc)
		}
	}
	return s, nil
}

// All are the containers in the order of their numbers.
func (s *podScript) All() []scriptContainer {
	return append(append([]scriptContainer(nil), s.Init...), s.Containers...)
}

// render is the text of pod.sh.
func (s *podScript) render() (string, error) {
	text, err := render("pod.sh.tmpl", s)
	if err != nil {
		return "", err
	}
	if err := checkText("the pod's script", text); err != nil {
		return "", err
	}
	return text, nil
}
