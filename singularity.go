package knoc

import (
	"encoding/csv"
	"fmt"
	"path"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// runtimeArgv is the command line that becomes a container, as the lines it is
// shown in: the runtime and its action, one line for each kind of option, then
// the image with the program, which the script has in variables. No value of the environment is in it but where the
// pod itself puts one into an argument by $(VAR): everybody on the compute node
// can read a command line.
//
// The flags are those of Apptainer 1.x and SingularityCE 3.10 and later:
// --containall keeps the user's home, /tmp, environment and processes out (it
// costs no time that could be measured), --no-eval keeps a shell from reading
// arguments and values once more, --no-umask gives 0022 instead of pod.sh's own
// 077, --silent keeps all but the runtime's errors out of the container's log: it
// warns of images without /etc/passwd and of users that the machine does not know.
func runtimeArgv(pod *v1.Pod, c *v1.Container, cfg scriptConfig) ([][]word, error) {
	mounts, err := mountsOf(pod, c)
	if err != nil {
		return nil, err
	}
	// Only an image that was never an OCI one has its program in a runscript, which
	// is what "run" starts; see program.
	action := word(`"$action"`)
	if len(c.Command) > 0 {
		action = "exec"
	}
	// The runtime knows no WORKDIR; "/" is what OCI has for an image without one.
	dir := word(`"${workdir:-/}"`)
	if c.WorkingDir != "" {
		dir = quote(c.WorkingDir)
	}
	mapped := isMapped(pod)
	contain := word("--containall")
	shared := isTrue(pod.Spec.ShareProcessNamespace)
	if shared {
		contain = "--contain --cleanenv --ipc" // all of it but the process namespace
	}
	options := []word{contain, "--no-eval", "--no-umask"}
	if asksFor(c, nvidiaGPU) {
		options = append(options, "--nv")
	}
	if asksFor(c, amdGPUs) {
		options = append(options, "--rocm")
	}
	host, domain := hostName(pod, cfg.ClusterDomain)
	if host != "" {
		name := host
		if isTrue(pod.Spec.SetHostnameAsFQDN) && domain != "" {
			name += "." + domain
		}
		options = append(options, "--hostname", quote(name))
	}
	argv := [][]word{{quote(cfg.Runtime), "--silent", action}, options, append(rootOptions(c, cfg, mapped), "--pwd", dir)}
	var finder []word
	if slices.ContainsFunc(c.VolumeMounts, func(m v1.VolumeMount) bool { return isPlace(pod, &m) }) {
		finder = placeWords(pod, c)
	}
	if mapped {
		argv[0] = append(launcher(c, shared, finder), quote(cfg.Runtime), "--silent", action)
		if users := userOptions(pod, c); users != nil {
			argv = append(argv, users)
		}
	} else {
		argv[0] = append(finder, argv[0]...)
	}
	if shared {
		join := word(`nsenter -F -U -m -p -w ${keep:+--preserve-credentials} -t "$shared" -- sh -c "$joined" ` + c.Name + ` "$attempt" "$using"`)
		argv = append([][]word{{join}}, argv...)
	}
	if ownHosts(pod) && !slices.ContainsFunc(mounts, func(m mount) bool { return m.Target == "/etc/hosts" }) {
		mounts = append(mounts, mount{Source: "run/pod.hosts", Target: "/etc/hosts"})
	}
	if resolverOf(pod) != nil && !slices.ContainsFunc(mounts, func(m mount) bool { return m.Target == "/etc/resolv.conf" }) {
		mounts = append(mounts, mount{Source: "run/pod.resolv", Target: "/etc/resolv.conf"})
	}
	mounts = messageMount(c, mounts)
	ownDev := devFiles(c, mounts) != nil
	if ownDev {
		argv = append(argv, []word{devMounts(c)})
	}
	for i, m := range mounts {
		if m.Mount != nil && isPlace(pod, m.Mount) {
			m.Source = fmt.Sprintf("%s/%d.%d", placeDir, numberOf(pod, c), i)
			m.ReadOnly = m.ReadOnly || slices.ContainsFunc(cfg.Hosted, func(h hostVolume) bool { return h.Volume == m.Mount.Name && h.ReadOnly })
		}
		source := path.Join(cfg.Dir, m.Source)
		volume, isVolume := strings.CutPrefix(m.Source, "vol/")
		if mapped && isVolume {
			source = onScratch + volume
		}
		spec, err := mountSpec(source, m.Target, m.ReadOnly)
		if err != nil {
			return nil, fmt.Errorf("container %s: the mount at %q: %w", c.Name, m.Target, err)
		}
		w := quote(spec)
		if mapped && isVolume {
			w = word(strings.Replace(string(w), onScratch, `'"$scratch/.vol/"'`, 1))
		}
		if _, ok := belowDev(m.Target); ok && ownDev && m.Mount == nil && !inside(m.Target, mounts) {
			argv = append(argv, []word{ifDev("--mount " + string(w))})
			continue
		}
		argv = append(argv, []word{"--mount", w})
	}
	return append(argv, []word{`"$sif"`, `"$@"`}), nil
}

// program are the words that make a container's command line, in "$@", as the API
// has it: command and args; without a command the image's ENTRYPOINT with args in
// place of CMD. Of the image that is in $entrypoint and $cmd, as quoted words.
func program(c *v1.Container, cfg scriptConfig) (set []word, eval word) {
	for _, s := range slices.Concat(c.Command, c.Args) {
		set = append(set, argument(s, envPrefix(cfg.Runtime)))
	}
	switch {
	case len(c.Command) > 0:
	case len(c.Args) > 0:
		eval = `"set -- $entrypoint"' "$@"'`
	default:
		eval = `"set -- $entrypoint $cmd"`
	}
	return set, eval
}

// onScratch stands for the volumes' directory on the node's scratch in a mount's
// source. Its characters need no quotes in CSV, and no path has a NUL.
const onScratch = "\x00"

// asksFor says whether the container has a device of that resource.
func asksFor(c *v1.Container, name v1.ResourceName) bool {
	limit, request := c.Resources.Limits[name], c.Resources.Requests[name]
	return limit.Sign() > 0 || request.Sign() > 0
}

// mountSpec is the value of --mount, which the runtime reads as one CSV record.
func mountSpec(source, target string, readOnly bool) (string, error) {
	record := []string{"type=bind", "source=" + source, "destination=" + target}
	if readOnly {
		record = append(record, "ro")
	}
	var b strings.Builder
	w := csv.NewWriter(&b)
	if err := w.Write(record); err != nil {
		return "", err
	}
	w.Flush()
	return strings.TrimSuffix(b.String(), "\n"), w.Error()
}
