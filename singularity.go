package knoc

import (
	"crypto/sha256"
	"encoding/csv"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// runtimeArgv is the command line that becomes a container, as the lines it is
// shown in: the runtime and its action, one line for each kind of option, then
// the image with the program. No value of the environment is in it but where the
// pod itself puts one into an argument by $(VAR): everybody on the compute node
// can read a command line.
//
// The flags are those of Apptainer 1.x and SingularityCE 3.10 and later:
// --containall keeps the user's home, /tmp, environment and processes out (it
// costs no time that could be measured), --no-eval keeps a shell from reading
// arguments and values once more, --no-umask gives 0022 instead of pod.sh's own
// 077, --quiet keeps INFO lines out of the container's log.
func runtimeArgv(pod *v1.Pod, c *v1.Container, cfg scriptConfig) ([][]word, error) {
	image, plainHTTP, err := imageRef(c.Image, cfg.InsecureRegistries)
	if err != nil {
		return nil, refuse("InvalidImageName", "container %s: %v", c.Name, err)
	}
	mounts, err := mountsOf(pod, c)
	if err != nil {
		return nil, err
	}
	// The image's ENTRYPOINT and CMD are the runscript that "run" starts with the
	// arguments after the image, if any, in place of CMD; "exec" starts a program
	// without it. That is what command and args mean in the API.
	action := word("run")
	if len(c.Command) > 0 {
		action = "exec"
	}
	// The runtime knows no WORKDIR; "/" is what OCI has for an image without one.
	dir := c.WorkingDir
	if dir == "" {
		dir = "/"
	}
	mapped := isMapped(pod)
	options := []word{"--containall", "--no-eval", "--no-umask"}
	if plainHTTP {
		options = append(options, "--no-https")
	}
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
	argv := [][]word{{quote(cfg.Runtime), "--quiet", action}, options, append(rootOptions(c, cfg, mapped), "--pwd", quote(dir))}
	if mapped {
		// It warns of every user that the machine does not know; --silent leaves
		// its errors.
		argv[0] = append(launcher(c), quote(cfg.Runtime), "--silent", action)
		if users := userOptions(pod, c); users != nil {
			argv = append(argv, users)
		}
	}
	if ownHosts(pod) && !slices.ContainsFunc(mounts, func(m mount) bool { return m.Target == "/etc/hosts" }) {
		mounts = append(mounts, mount{Source: "run/pod.hosts", Target: "/etc/hosts"})
	}
	mounts = messageMount(c, mounts)
	ownDev := devFiles(c, mounts) != nil
	if ownDev {
		argv = append(argv, []word{devMounts(c)})
	}
	for _, m := range mounts {
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
		if _, ok := belowDev(m.Target); ok && ownDev && !isVolume && !inside(m.Target, mounts) {
			argv = append(argv, []word{ifDev("--mount " + string(w))})
			continue
		}
		argv = append(argv, []word{"--mount", w})
	}
	program := []word{quote(image)}
	for _, s := range slices.Concat(c.Command, c.Args) {
		program = append(program, argument(s, envPrefix(cfg.Runtime)))
	}
	return append(argv, program), nil
}

// onScratch stands for the volumes' directory on the node's scratch in a mount's
// source. Its characters need no quotes in CSV, and no path has a NUL.
const onScratch = "\x00"

// pullArgv are the arguments of fetch in pod.sh: a name for the image that is
// valid as a file's, and the command that brings it into the runtime's cache. An
// image file needs none.
func pullArgv(c *v1.Container, cfg scriptConfig) ([]word, error) {
	image, plainHTTP, err := imageRef(c.Image, cfg.InsecureRegistries)
	if err != nil {
		return nil, refuse("InvalidImageName", "container %s: %v", c.Name, err)
	}
	if strings.HasPrefix(image, "/") {
		return nil, nil
	}
	argv := []word{word(fmt.Sprintf("%x", sha256.Sum256([]byte(image)))[:32]), quote(cfg.Runtime), "--quiet", "pull"}
	if plainHTTP {
		argv = append(argv, "--no-https")
	}
	return append(argv, "../images/lock/image", quote(image)), nil
}

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

// argument is the shell word for one element of command or args. $(VAR) refers
// to a variable of the container, which the shell has from env/<container> by
// then: so a secret value is in no script, and an address that only the compute
// node knows needs no special case. A reference to a variable that does not
// exist stays as it is written (kubelet: ExpandContainerCommandAndArgs).
func argument(s, prefix string) word {
	parts := expand(s, func(name string) ([]valuePart, bool) {
		return []valuePart{{Var: name}}, shellName.MatchString(name)
	})
	var w word
	for _, p := range parts {
		if p.Var == "" {
			w += quote(p.Text)
			continue
		}
		w += word(fmt.Sprintf(`"${%s%s-\$(%s)}"`, prefix, p.Var, p.Var))
	}
	if w == "" {
		w = quote("")
	}
	return w
}

// envPrefix begins the names of the variables that the runtime hands to the
// container. Apptainer takes Singularity's too, but says so in every log.
func envPrefix(runtime string) string {
	if strings.Contains(path.Base(runtime), "singularity") {
		return "SINGULARITYENV_"
	}
	return "APPTAINERENV_"
}

// envFile is env/<container>: shell text that sets the container's environment.
// pod.sh reads it in the process that becomes the runtime.
func envFile(vars []envVar, runtime string) ([]byte, error) {
	var b strings.Builder
	b.WriteString("# A container's environment, written by knoc. It may hold secrets.\n")
	for _, v := range vars {
		if !shellName.MatchString(v.Name) {
			return nil, refuse("UnsupportedField", "the environment variable name %q cannot be carried by a shell on the cluster; use letters, digits and underscores, not starting with a digit", v.Name)
		}
		value := quote("")
		if len(v.Value) > 0 {
			value = ""
		}
		for _, p := range v.Value {
			if err := checkText("the environment variable "+v.Name, p.Text); err != nil {
				return nil, err
			}
			switch {
			case p.Var == "":
				value += quote(p.Text)
			case shellName.MatchString(p.Var):
				value += word(`"$` + p.Var + `"`)
			default:
				return nil, fmt.Errorf("the environment variable %s: %q is no shell variable", v.Name, p.Var)
			}
		}
		fmt.Fprintf(&b, "export %s%s=%s\n", envPrefix(runtime), v.Name, value)
	}
	return []byte(b.String()), nil
}

// The grammar of image references, as in github.com/distribution/reference, which
// the kubelet and the runtimes follow: registry, path, tag, digest. A first
// component that is no registry but part of the path is taken for one here, which
// only matters where somebody calls a registry so.
var (
	dockerRef = regexp.MustCompile(`^(?:(` + registryHost + `)/)?` +
		`([a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*)` +
		`(?::([A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?` +
		`(@[A-Za-z][A-Za-z0-9]*(?:[+._-][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?$`)
	otherRef = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$`)
	filePath = regexp.MustCompile(`^/[A-Za-z0-9._/@+~-]+$`)
)

const registryHost = `(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*|\[[0-9a-fA-F:]+\])(?::[0-9]+)?`

// imageRef is a container's image as the runtime names it, and whether its
// registry is one that speaks plain HTTP.
func imageRef(image string, insecure []string) (ref string, plainHTTP bool, err error) {
	scheme, rest, found := strings.Cut(image, "://")
	switch {
	case strings.HasPrefix(image, "/"):
		scheme, rest = "file", image
	case strings.HasPrefix(image, "file:"):
		scheme, rest = "file", strings.TrimPrefix(strings.TrimPrefix(image, "file:"), "//")
	case !found:
		scheme, rest = "docker", image
	}
	var registry string
	switch scheme {
	case "file":
		if !filePath.MatchString(rest) {
			return "", false, fmt.Errorf("image %q: an image file is named by its absolute path on the cluster, of letters, digits and . _ / @ + ~ -", image)
		}
		return rest, false, nil
	case "docker":
		m := dockerRef.FindStringSubmatch(rest)
		if m == nil {
			return "", false, fmt.Errorf("image %q is not a valid reference: write [registry[:port]/]name[:tag][@digest], the name in lower case", image)
		}
		registry = m[1]
		if m[4] != "" {
			// A digest says which; the runtime refuses a tag beside it.
			rest = strings.TrimPrefix(m[1]+"/"+m[2], "/") + m[4]
		}
	case "oras", "library", "shub":
		if !otherRef.MatchString(rest) {
			return "", false, fmt.Errorf("image %q is not a valid reference", image)
		}
		registry, _, _ = strings.Cut(rest, "/")
	default:
		return "", false, fmt.Errorf("image %q: the scheme %q is not supported; use docker, oras, library or shub, or the absolute path of an image file on the cluster", image, scheme)
	}
	return scheme + "://" + rest, slices.Contains(insecure, registry), nil
}
