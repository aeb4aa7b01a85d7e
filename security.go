package knoc

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// Where what a container writes outside of its volumes goes (Config.WritableRoot).
const (
	rootOnScratch = "scratch" // a directory on the compute node
	rootInMemory  = "memory"  // the runtime's own tmpfs, 64 MB by default
	rootReadOnly  = "none"
)

// What becomes of a pod that asks for user ids where its user has no subordinate
// ids (Config.WithoutSubIDs).
const (
	idsRefuse = "refuse"
	idsIgnore = "ignore"
)

// runAs is who a container runs as in a pod with users of its own.
type runAs struct {
	User, Group int64
	Groups      []int64 // more than Group
}

// isMapped says whether a pod has users of its own: whether it names any id. Its
// containers then run in a user namespace where root is the HPC user, and all
// other ids are subordinate ids of that user. Others run as the HPC user.
func isMapped(pod *v1.Pod) bool {
	if s := pod.Spec.SecurityContext; s != nil && (s.RunAsUser != nil || s.RunAsGroup != nil || s.FSGroup != nil || len(s.SupplementalGroups) > 0) {
		return true
	}
	return slices.ContainsFunc(allContainers(pod), func(c *v1.Container) bool {
		return c.SecurityContext != nil && (c.SecurityContext.RunAsUser != nil || c.SecurityContext.RunAsGroup != nil)
	})
}

// runAsOf is who the container of a mapped pod runs as: its own settings before
// the pod's (DetermineEffectiveSecurityContext in pkg/securitycontext), root
// where neither says.
func runAsOf(pod *v1.Pod, c *v1.Container) runAs {
	var id runAs
	take := func(user, group *int64) {
		if user != nil {
			id.User = *user
		}
		if group != nil {
			id.Group = *group
		}
	}
	if s := pod.Spec.SecurityContext; s != nil {
		take(s.RunAsUser, s.RunAsGroup)
		if s.FSGroup != nil {
			id.Groups = append(id.Groups, *s.FSGroup)
		}
		for _, g := range s.SupplementalGroups {
			if !slices.Contains(id.Groups, g) {
				id.Groups = append(id.Groups, g)
			}
		}
	}
	if s := c.SecurityContext; s != nil {
		take(s.RunAsUser, s.RunAsGroup)
	}
	return id
}

// groups are all groups, separated by sep, the first one first.
func (id runAs) groups(sep string) string {
	list := []string{strconv.FormatInt(id.Group, 10)}
	for _, g := range id.Groups {
		list = append(list, strconv.FormatInt(g, 10))
	}
	return strings.Join(list, sep)
}

// mustNotBeRoot is runAsNonRoot of the container, or of the pod.
func mustNotBeRoot(pod *v1.Pod, c *v1.Container) bool {
	if s := c.SecurityContext; s != nil && s.RunAsNonRoot != nil {
		return *s.RunAsNonRoot
	}
	s := pod.Spec.SecurityContext
	return s != nil && isTrue(s.RunAsNonRoot)
}

// noSubIDs is the reason of events, and of pods that do not run for it.
const noSubIDs = "NoSubordinateIDs"

// withoutIDs says why a pod has no user ids of its own: the word after noids in the
// journal.
func withoutIDs(why string) string {
	text := map[string]string{
		"tools":     "newuidmap, newgidmap or nsenter is not installed",
		"subuid":    "/etc/subuid or /etc/subgid names no range for the user",
		"namespace": "no user namespace with them could be made",
	}[why]
	if text == "" {
		text = "what is missing is not known"
	}
	return "the pod names user or group ids, and its user has no subordinate ids on the compute node: " + text
}

// capability is the name of one, with or without its prefix.
var capability = regexp.MustCompile(`^[A-Za-z][A-Za-z_]{1,40}$`)

// users checks the ids and capabilities that a pod names.
func (k *checker) users(pod *v1.Pod) {
	for _, c := range allContainers(pod) {
		if s := c.SecurityContext; s != nil && s.Capabilities != nil {
			for _, name := range s.Capabilities.Drop {
				if !capability.MatchString(string(name)) {
					k.refuse("InvalidPod", "container %s: the capability %q is none", c.Name, name)
				}
			}
		}
	}
	if !isMapped(pod) {
		return
	}
	for _, c := range allContainers(pod) {
		id := runAsOf(pod, c)
		for _, n := range append([]int64{id.User, id.Group}, id.Groups...) {
			if n < 0 || n > 1<<31-1 {
				k.refuse("InvalidPod", "container %s: the user or group id %d is not one of 0 to 2147483647", c.Name, n)
			}
		}
		if id.User != 0 || !mustNotBeRoot(pod, c) {
			continue
		}
		if s := c.SecurityContext; s != nil && s.RunAsUser != nil || pod.Spec.SecurityContext != nil && pod.Spec.SecurityContext.RunAsUser != nil {
			k.refuse("UnsupportedField", "container %s: runAsUser is 0, which breaks runAsNonRoot", c.Name)
		} else {
			k.refuse("UnsupportedField", "container %s: runAsNonRoot with groups needs runAsUser: knoc does not read the image's user", c.Name)
		}
	}
}

// readOnlyRoot says whether the container cannot write outside of its volumes.
func readOnlyRoot(c *v1.Container, cfg scriptConfig) bool {
	return cfg.WritableRoot == rootReadOnly || c.SecurityContext != nil && isTrue(c.SecurityContext.ReadOnlyRootFilesystem)
}

// rootOptions are the runtime's options for what a container may write to. Its
// own root is read-only. Without users of its own a pod sees the image's /tmp as
// somebody else's, so that the runtime makes one, and the home, where the rest is.
func rootOptions(c *v1.Container, cfg scriptConfig, mapped bool) []word {
	dir := `"$scratch/` + c.Name + `"`
	overlay := []word{word(`${overlay:+--overlay ` + dir + `}`), "${tmpfs:+--writable-tmpfs}"}
	switch {
	case readOnlyRoot(c, cfg):
		return []word{"--no-mount", "tmp,home"}
	case cfg.WritableRoot == rootInMemory:
		return []word{"--writable-tmpfs"}
	case mapped:
		return append(overlay, `${holder:+--no-mount tmp}`)
	}
	return append(overlay, "--workdir", word(dir))
}

// userOptions are the runtime's options for who a container of a mapped pod is.
// They hold while there are subordinate ids, which the script knows in $holder.
func userOptions(pod *v1.Pod, c *v1.Container) []word {
	id := runAsOf(pod, c)
	var options []string
	if id.User != 0 {
		// Neither the image's nor the machine's list of users says where its home is.
		options = append(options, "${home---home /none:/}")
	}
	switch {
	case id.User != 0:
		options = append(options, fmt.Sprintf("--security uid:%d --security gid:%s", id.User, id.groups(":")))
	case id.Group != 0 || len(id.Groups) > 0:
		// Whoever names groups loses root's capabilities by it.
		options = append(options, "--security gid:"+id.groups(":"), "--add-caps all")
	}
	if id.User == 0 {
		for _, drop := range dropped(c) {
			options = append(options, "--drop-caps "+drop)
		}
	}
	if len(options) == 0 {
		return nil
	}
	return []word{word("${holder:+" + strings.Join(options, " ") + "}")}
}

// dropped are the capabilities that a root in a mapped pod goes without, as the
// runtime names them. Others have none.
func dropped(c *v1.Container) []string {
	if c.SecurityContext == nil || c.SecurityContext.Capabilities == nil {
		return nil
	}
	var names []string
	for _, name := range c.SecurityContext.Capabilities.Drop {
		text := strings.ToUpper(string(name))
		if text == "ALL" {
			return []string{"all"}
		}
		if !capability.MatchString(text) {
			continue // checkPod refuses it
		}
		names = append(names, "CAP_"+strings.TrimPrefix(text, "CAP_"))
	}
	if len(names) == 0 {
		return nil
	}
	return []string{strings.Join(names, ",")}
}

// launcher are the words before the runtime: into the pod's user namespace, where
// a shared process namespace leads to already, then those in between.
func launcher(c *v1.Container, shared bool, between []word) []word {
	var words []word
	if !shared {
		words = append(words, `${holder:+nsenter -U -t "$holder" --}`)
	}
	words = append(words, between...)
	if s := c.SecurityContext; s != nil && s.AllowPrivilegeEscalation != nil && !*s.AllowPrivilegeEscalation {
		// The runtime does so itself for all but root.
		words = append(words, "${holder:+setpriv --no-new-privs}")
	}
	return words
}

// hostName is the pod's host name as the kubelet makes it
// (GeneratePodHostNameAndDomain in pkg/kubelet), and the domain; "" for a pod that
// has its node's.
func hostName(pod *v1.Pod, clusterDomain string) (name, domain string) {
	if pod.Spec.HostNetwork {
		return "", ""
	}
	if o := pod.Spec.HostnameOverride; o != nil {
		return *o, ""
	}
	name = pod.Spec.Hostname
	if name == "" {
		name = strings.TrimRight(pod.Name[:min(len(pod.Name), 63)], "-.")
	}
	if pod.Spec.Subdomain != "" {
		if clusterDomain == "" {
			clusterDomain = "cluster.local"
		}
		domain = fmt.Sprintf("%s.%s.svc.%s", pod.Spec.Subdomain, pod.Namespace, clusterDomain)
	}
	return name, domain
}

// ownHosts says whether containers have a hosts file of their own.
func ownHosts(pod *v1.Pod) bool { return !pod.Spec.HostNetwork || len(pod.Spec.HostAliases) > 0 }

// scratchData is what pod.scratch.tmpl needs.
type scratchData struct {
	Roots  []string // containers whose root does
	Mapped bool     // the pod has users of its own
	Strict bool     // it does not run without them
	// FarUsers and FarGroups are ids beyond the 65536 that there are as a rule.
	FarUsers, FarGroups string
	FSGroup             string // "" for none
	EmptyDirs           []string
	NodeDirs            []nodeDir // of those the ones that pod.sh makes
	Memory              bool      // some of them in memory
	SizeLimits          []sizeLimit
	// DevMessage says that a container names a path below /dev for its message.
	DevMessage bool

	Hosts     bool // containers have a host name of their own
	HostName  string
	HostAlias string    // a blank and its short form, if it has a domain
	Resolver  *resolver // nil: the node's
	// HostAliases are lines for the hosts file.
	HostAliases []string
}

func (s *scratchData) has(name string) bool { return slices.Contains(s.Roots, name) }

func scratchOf(pod *v1.Pod, cfg scriptConfig) scratchData {
	d := scratchData{Mapped: isMapped(pod), Strict: cfg.WithoutSubIDs != idsIgnore}
	var users, groups []string
	far := func(list *[]string, id int64) {
		if text := strconv.FormatInt(id, 10); id >= 1<<16 && !slices.Contains(*list, text) {
			*list = append(*list, text)
		}
	}
	for _, c := range allContainers(pod) {
		if !readOnlyRoot(c, cfg) && cfg.WritableRoot != rootInMemory {
			d.Roots = append(d.Roots, c.Name)
		}
		if d.Mapped {
			id := runAsOf(pod, c)
			far(&users, id.User)
			for _, g := range append([]int64{id.Group}, id.Groups...) {
				far(&groups, g)
			}
		}
	}
	d.NodeDirs, d.SizeLimits = nodeDirs(pod), sizeLimits(pod)
	d.Memory = slices.ContainsFunc(d.NodeDirs, func(n nodeDir) bool { return n.Memory })
	d.FarUsers, d.FarGroups = strings.Join(users, " "), strings.Join(groups, " ")
	d.DevMessage = slices.ContainsFunc(allContainers(pod), func(c *v1.Container) bool {
		_, ok := belowDev(messagePath(c))
		return ok && messagePath(c) != v1.TerminationMessagePathDefault && devOf(pod, c) != nil
	})
	if s := pod.Spec.SecurityContext; s != nil && s.FSGroup != nil {
		d.FSGroup = strconv.FormatInt(*s.FSGroup, 10)
	}
	for i := range pod.Spec.Volumes {
		if v := &pod.Spec.Volumes[i]; isEmptyDir(v) {
			d.EmptyDirs = append(d.EmptyDirs, v.Name)
		}
	}
	d.Resolver = resolverOf(pod)
	name, domain := hostName(pod, cfg.ClusterDomain)
	d.HostName, d.Hosts = name, ownHosts(pod)
	if domain != "" {
		d.HostName, d.HostAlias = name+"."+domain, "\t"+name
	}
	if len(pod.Spec.HostAliases) > 0 {
		d.HostAliases = []string{"", "# Entries added by HostAliases."}
		for _, a := range pod.Spec.HostAliases {
			d.HostAliases = append(d.HostAliases, a.IP+"\t"+strings.Join(a.Hostnames, "\t"))
		}
	}
	return d
}

// enterAs are setpriv's options and nsenter's user id with which run/enter.sh, as
// root of the pod's user namespace, becomes the container's user; nil where the
// pod has no users of its own. The groups come first, while it is root still; the
// user is nsenter's work, once it has entered all else.
func enterAs(pod *v1.Pod, c *v1.Container) (words []word, user word) {
	if !isMapped(pod) {
		return nil, ""
	}
	id := runAsOf(pod, c)
	groups := word("--clear-groups")
	if len(id.Groups) > 0 {
		_, rest, _ := strings.Cut(id.groups(","), ",")
		groups = word("--groups=" + rest)
	}
	words = []word{word(fmt.Sprintf("--regid=%d", id.Group)), groups}
	if no := c.SecurityContext; id.User != 0 || no != nil && no.AllowPrivilegeEscalation != nil && !*no.AllowPrivilegeEscalation {
		words = append(words, "--no-new-privs")
	}
	return words, word(strconv.FormatInt(id.User, 10))
}
