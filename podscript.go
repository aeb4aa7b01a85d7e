package knoc

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
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
	// ImageRewrites are the site's, ImageRoot the pod's own directory of images.
	ImageRewrites rewrites
	ImageRoot     string
	// Credentials are those of the pod's imagePullSecrets.
	Credentials credentials
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
	// UsageSeconds is how often a job writes down what its containers use; 0 is never.
	UsageSeconds int
	// Hosted are the pod's volumes that are on the compute nodes already, and
	// HostPaths the directories that these may be in.
	Hosted    []hostVolume
	HostPaths []string
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
	Runtime, RuntimeName string
	Options              []string
	Grace                int64
	Deadline             int64 // seconds from the allocation's start; 0: none
	Backoff              int
	Usage                int // seconds between looks at what is used; 0: none
	Init, Containers     []scriptContainer
	Hosted               []hostVolume
	HostPaths            []string
	Shared               bool // the containers have one process namespace
	scratchData
}

// scriptContainer is one container of a podScript. Number counts from 1 through
// the init containers and then the others.
type scriptContainer struct {
	Number int
	Name   string
	Argv   [][]word
	Fresh  bool   // something of it is on the node's scratch
	Dev    []word // what its /dev has (devFiles); nil: the runtime's alone
	Enter  []word // how run/enter.sh becomes the container's user (enterAs)
	User   word
	Set    []word // the pod's words for the program (program)
	Eval   word   // and the image's, around them; "" for none
	Pull   []word // fetch's arguments; nil for an image file, which is SIF
	SIF    word
	Places []place
	Room   bool // it finds them in namespaces of its own
	// Policy says whether the container runs again: the container's own, or what
	// the pod's means for it.
	Policy  string
	Rules   []exitRule // when it runs again whatever the policy
	Sidecar bool
	// Post and Pre are the hooks as one simple command each; nil: none. $1 of Pre
	// is how many seconds it may take.
	Post, Pre []word
	Signal    int  // stops it instead of TERM; 0: none
	Probed    bool // run/probe.sh is to run beside it
	Startup   bool // run/probe.sh says when it has started
	Fallback  bool // the end of its log stands in for a termination message
}

// exitRule is one of a container's restartPolicyRules: it asks for a restart
// after the exit codes of a shell's pattern, or after all others.
type exitRule struct {
	In    bool
	Codes string
}

// Follow says whether something is to be done beside the running container.
func (c scriptContainer) Follow() bool { return c.Post != nil || c.Probed }

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
	cfg.ImageRoot = pod.Annotations[imageRootAnnotation]
	s := &podScript{
		Namespace:   pod.Namespace,
		Name:        pod.Name,
		UID:         string(pod.UID),
		Dir:         cfg.Dir,
		Runtime:     cfg.Runtime,
		RuntimeName: path.Base(cfg.Runtime),
		Options:     cfg.Options,
		Grace:       max(0, gracePeriod(pod)),
		Backoff:     cfg.BackoffSeconds,
		Usage:       cfg.UsageSeconds,
		Hosted:      cfg.Hosted,
		HostPaths:   cfg.HostPaths,
		Shared:      isTrue(pod.Spec.ShareProcessNamespace),
	}
	if d := pod.Spec.ActiveDeadlineSeconds; d != nil {
		s.Deadline = *d
	}
	s.scratchData = scratchOf(pod, cfg)
	if s.Backoff == 0 {
		s.Backoff = 10
	}
	if !strings.HasPrefix(cfg.Dir, "/") {
		return nil, fmt.Errorf("the pod's directory %q is not an absolute path", cfg.Dir)
	}
	plain := map[string]string{
		"namespace": s.Namespace, "name": s.Name, "uid": s.UID, "directory": s.Dir,
		"runtime": cfg.Runtime,
	}
	for i, c := range allContainers(pod) {
		plain["container name "+c.Name] = c.Name
		plain["restart policy of container "+c.Name] = policyOf(pod, c, i < len(pod.Spec.InitContainers))
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
		pull, sif, err := imageWords(c, cfg)
		if err != nil {
			return nil, err
		}
		init := i < len(pod.Spec.InitContainers)
		sc := scriptContainer{
			Number: i + 1, Name: c.Name, Argv: argv, Pull: pull, SIF: sif, Dev: devOf(pod, c),
			Policy: policyOf(pod, c, init), Rules: exitRules(c, init), Sidecar: init && isSidecar(c),
			Startup: c.StartupProbe != nil,
			Probed:  c.StartupProbe != nil || c.ReadinessProbe != nil || c.LivenessProbe != nil,
		}
		sc.Fresh = s.Mapped || s.has(c.Name) || sc.Dev != nil
		sc.Set, sc.Eval = program(c, cfg)
		sc.Signal = stopSignal(c)
		sc.Enter, sc.User = enterAs(pod, c)
		if sc.Places, err = placesOf(pod, c, envPrefix(cfg.Runtime)); err != nil {
			return nil, err
		}
		sc.Room = needsRoom(pod, c)
		if l := c.Lifecycle; l != nil {
			sc.Post, sc.Pre = hookArgv(c, "post", l.PostStart), hookArgv(c, "pre", l.PreStop)
		}
		sc.Fallback = c.TerminationMessagePolicy == v1.TerminationMessageFallbackToLogsOnError
		if init {
			s.Init = append(s.Init, sc)
		} else {
			s.Containers = append(s.Containers, sc)
		}
	}
	return s, nil
}

// policyOf is the restart policy of one container: its own before the pod's. An
// init container that ends well has done its work, whatever the policy.
func policyOf(pod *v1.Pod, c *v1.Container, init bool) string {
	policy := string(pod.Spec.RestartPolicy)
	switch {
	case c.RestartPolicy != nil:
		return string(*c.RestartPolicy)
	case policy == "", policy == string(v1.RestartPolicyAlways):
		if init {
			return string(v1.RestartPolicyOnFailure)
		}
		return string(v1.RestartPolicyAlways) // the API's default
	}
	return policy
}

// exitRules are a container's restartPolicyRules, whose one action is Restart
// (see fieldRules). Nothing makes an init container that ended well run again.
func exitRules(c *v1.Container, init bool) []exitRule {
	var rules []exitRule
	for i := range c.RestartPolicyRules {
		on := c.RestartPolicyRules[i].ExitCodes
		if on == nil {
			continue
		}
		in := on.Operator == v1.ContainerRestartRuleOnExitCodesOpIn
		var codes []string
		for _, v := range on.Values {
			if in && v == 0 && init {
				continue
			}
			codes = append(codes, strconv.Itoa(int(v)))
		}
		if !in && init {
			codes = append(codes, "0")
		}
		if len(codes) == 0 {
			codes = []string{"''"} // no code
		}
		rules = append(rules, exitRule{in, strings.Join(codes, " | ")})
	}
	return rules
}

// All are the containers in the order of their numbers.
func (s *podScript) All() []scriptContainer {
	return slices.Concat(s.Init, s.Containers)
}

// Reverse are the containers, the last one first.
func (s *podScript) Reverse() []scriptContainer {
	all := s.All()
	slices.Reverse(all)
	return all
}

// The script has only the parts that its containers need.

// RuntimeDevices are the names in the runtime's /dev.
func (s *podScript) RuntimeDevices() []string { return runtimeDevices }

// Rules says whether any container has restart rules.
func (s *podScript) Rules() bool {
	return slices.ContainsFunc(s.All(), func(c scriptContainer) bool { return c.Rules != nil })
}

// FirstUsage is the second of the first look.
func (s *podScript) FirstUsage() int { return min(3, s.Usage-1) }

// Places says whether any container has places.
func (s *podScript) Places() bool {
	return slices.ContainsFunc(s.All(), func(c scriptContainer) bool { return c.Places != nil })
}

// Rooms says whether any container finds them in namespaces of its own.
func (s *podScript) Rooms() bool {
	return slices.ContainsFunc(s.All(), func(c scriptContainer) bool { return c.Room })
}

// Followed says whether any container has a postStart hook or probes.
func (s *podScript) Followed() bool { return slices.ContainsFunc(s.All(), scriptContainer.Follow) }

// Signals says whether any container is stopped by another signal than TERM.
func (s *podScript) Signals() bool {
	return slices.ContainsFunc(s.All(), func(c scriptContainer) bool { return c.Signal != 0 })
}

// Posts says whether any container has a postStart hook.
func (s *podScript) Posts() bool {
	return slices.ContainsFunc(s.All(), func(c scriptContainer) bool { return c.Post != nil })
}

// Settle says whether some container starts only when another one has come far
// enough.
func (s *podScript) Settle() bool { return s.Sidecars() != "" || s.Posts() }

// Hooked says whether any container has hooks.
func (s *podScript) Hooked() bool { return s.Posts() || s.PreStops() != "" }

// Sidecars are the names of the sidecars, each between blanks; "" for none.
func (s *podScript) Sidecars() string {
	return names(s.All(), func(c scriptContainer) bool { return c.Sidecar })
}

// PreStops are the names of the containers with a preStop hook.
func (s *podScript) PreStops() string {
	return names(s.All(), func(c scriptContainer) bool { return c.Pre != nil })
}

// Fallbacks are the names of the containers whose log stands in for a message.
func (s *podScript) Fallbacks() string {
	return names(s.All(), func(c scriptContainer) bool { return c.Fallback })
}

// names are those of some containers, as a list for the shell's case; "" for none.
func names(all []scriptContainer, which func(scriptContainer) bool) string {
	list := ""
	for _, c := range all {
		if which(c) {
			list += " " + c.Name
		}
	}
	if list != "" {
		list += " "
	}
	return list
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

// part is what pod.sh has of one container, by its number, as a text of its own:
// it is read when that container gets another image, or comes later.
func (s *podScript) part(number int) (string, error) {
	c := s.All()[number-1]
	text, err := render("container.tmpl", c)
	if err != nil {
		return "", err
	}
	if c.Rules == nil { // another container may have some, and then all are asked
		text += fmt.Sprintf("rule_%d() { return 1; }\n", number)
	}
	return text, checkText("the container's script", text)
}
