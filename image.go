package knoc

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// imageSource is where a container's image comes from.
type imageSource struct {
	// Path is that of an image file or a sandbox on the cluster; the other fields
	// are empty then.
	Path string
	// Ref is what the runtime pulls, Repository what an image id begins with: ""
	// for what is no OCI registry.
	Ref, Repository string
	// Manifest is the URL at which a registry tells the reference's digest, ByDigest
	// what the runtime pulls once that is known, without the digest itself.
	Manifest, ByDigest string
	PlainHTTP          bool
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

// findImage takes a container's image apart.
func findImage(image string, insecure []string) (src imageSource, err error) {
	scheme, rest, found := strings.Cut(image, "://")
	switch {
	case strings.HasPrefix(image, "/"):
		scheme, rest = "file", image
	case strings.HasPrefix(image, "file:"):
		scheme, rest = "file", strings.TrimPrefix(strings.TrimPrefix(image, "file:"), "//")
	case !found:
		scheme, rest = "docker", image
	}
	switch scheme {
	case "file":
		if !filePath.MatchString(rest) {
			return src, fmt.Errorf("image %q: an image file is named by its absolute path on the cluster, or by one below that in annotation slurm-job.knoc.io/image-root, of letters, digits and . _ / @ + ~ -", image)
		}
		return imageSource{Path: rest}, nil
	case "docker":
		m := dockerRef.FindStringSubmatch(rest)
		if m == nil {
			return src, fmt.Errorf("image %q is not a valid reference: write [registry[:port]/]name[:tag][@digest], the name in lower case", image)
		}
		registry, name, version := m[1], m[2], m[3]
		if registry != "" && registry != "localhost" && !strings.ContainsAny(registry, ".:") && strings.ToLower(registry) == registry {
			registry, name = "", registry+"/"+name // a path of Docker Hub
		}
		if m[4] != "" {
			// A digest says which; the runtime refuses a tag beside it.
			rest, version = strings.TrimPrefix(m[1]+"/"+m[2], "/")+m[4], m[4][1:]
		}
		if version == "" {
			version = "latest"
		}
		src = imageSource{Ref: scheme + "://" + rest}
		src.registry(registry, name, version, insecure)
		src.ByDigest = "docker://" + strings.TrimPrefix(m[1]+"/"+m[2], "/") + "@"
	case "oras", "library", "shub":
		if !otherRef.MatchString(rest) {
			return src, fmt.Errorf("image %q is not a valid reference", image)
		}
		registry, _, _ := strings.Cut(rest, "/")
		src = imageSource{Ref: scheme + "://" + rest, PlainHTTP: slices.Contains(insecure, registry)}
		if m := dockerRef.FindStringSubmatch(rest); scheme == "oras" && m != nil && m[1] != "" {
			version := m[3]
			switch {
			case m[4] != "":
				version = m[4][1:]
			case version == "":
				version = "latest"
			}
			src.registry(m[1], m[2], version, insecure)
		}
	default:
		return src, fmt.Errorf("image %q: the scheme %q is not supported; use docker, oras, library or shub, or the absolute path of an image file on the cluster", image, scheme)
	}
	return src, nil
}

// registry fills in what concerns an OCI registry.
func (src *imageSource) registry(host, name, version string, insecure []string) {
	server := host
	if host == "" || host == "docker.io" || host == "index.docker.io" {
		host, server = "docker.io", "registry-1.docker.io"
		if !strings.Contains(name, "/") {
			name = "library/" + name
		}
	}
	protocol := "https://"
	if src.PlainHTTP = slices.Contains(insecure, host); src.PlainHTTP {
		protocol = "http://"
	}
	src.Repository = host + "/" + name
	src.Manifest = protocol + server + "/v2/" + name + "/manifests/" + version
}

// rewrites are rules of Config.ImageRewrites: what begins with the one is looked
// for at the other.
type rewrites [][2]string

// checkRewrites reads from=to words.
func checkRewrites(words []string) (rules rewrites, err error) {
	for _, w := range words {
		from, to, _ := strings.Cut(w, "=")
		for _, part := range []string{from, to} {
			if m := dockerRef.FindStringSubmatch(part + "/x"); m == nil || !strings.ContainsAny(m[1], ".:") && m[1] != "localhost" {
				return nil, fmt.Errorf("--image-rewrite %q: write registry[/path]=registry[/path], such as docker.io=mirror.example.org/hub", w)
			}
		}
		rules = append(rules, [2]string{from, to})
	}
	return rules, nil
}

// apply is where a docker reference is looked for: by the longest rule that fits
// its full name.
func (rules rewrites) apply(image string) string {
	src, err := findImage(image, nil)
	if len(rules) == 0 || err != nil || src.ByDigest == "" {
		return image
	}
	best := [2]string{}
	for _, rule := range rules {
		if rest, ok := strings.CutPrefix(src.Repository+"/", rule[0]+"/"); ok && len(rule[0]) >= len(best[0]) {
			best = [2]string{rule[0], strings.TrimSuffix(rule[1]+"/"+rest, "/")}
		}
	}
	if best[1] == "" {
		return image
	}
	version := src.Manifest[strings.LastIndexByte(src.Manifest, '/')+1:]
	if strings.Contains(version, ":") {
		return best[1] + "@" + version
	}
	return best[1] + ":" + version
}

// imageRootAnnotation is the directory on the cluster that the pod's file:
// images with a relative path lie in.
const imageRootAnnotation = "slurm-job.knoc.io/image-root"

// source is where a container's image comes from here: after the rules of the
// site, and for a file below the pod's own directory of images.
func (cfg scriptConfig) source(image string) (imageSource, error) {
	if rest, ok := strings.CutPrefix(image, "file:"); ok && cfg.ImageRoot != "" && !strings.HasPrefix(rest, "/") {
		image = "file:" + strings.TrimSuffix(cfg.ImageRoot, "/") + "/" + rest
	}
	return findImage(cfg.ImageRewrites.apply(image), cfg.InsecureRegistries)
}

// pullPolicy is a container's imagePullPolicy, as the API server fills it in.
func pullPolicy(c *v1.Container) v1.PullPolicy {
	if c.ImagePullPolicy != "" {
		return c.ImagePullPolicy
	}
	if m := dockerRef.FindStringSubmatch(strings.TrimPrefix(c.Image, "docker://")); m != nil && m[4] == "" && (m[3] == "" || m[3] == "latest") {
		return v1.PullAlways
	}
	return v1.PullIfNotPresent
}

// invalidImageName is the waiting reason of a container whose image has no valid
// name. It can be given another one.
const invalidImageName = "InvalidImageName"

// imageWords are how pod.sh gets a container's image: the arguments of fetch after
// the container's name, or nil and the image's path.
func imageWords(c *v1.Container, cfg scriptConfig) (fetch []word, path word, err error) {
	src, err := cfg.source(c.Image)
	if err != nil {
		return nil, "", &notYet{invalidImageName, fmt.Sprintf("Failed to apply default image tag %q: couldn't parse image name: container %s: %v", c.Image, c.Name, err)}
	}
	if src.Path != "" {
		return nil, quote(src.Path), nil
	}
	policy := string(pullPolicy(c))
	switch v1.PullPolicy(policy) {
	case v1.PullAlways, v1.PullIfNotPresent, v1.PullNever:
	default:
		return nil, "", refuse("InvalidPod", "container %s: imagePullPolicy %q is not Always, IfNotPresent or Never", c.Name, policy)
	}
	fetch = []word{word(src.key(cfg.Credentials.lookup(src.Repository))), word(policy), quote(src.Ref), quote(src.Manifest), quote(src.ByDigest)}
	if src.PlainHTTP {
		fetch = append(fetch, "--no-https")
	}
	return fetch, "", nil
}

// key names what a reference has resolved to in the cache, for whoever has the
// same credentials: others have to show theirs to the registry first.
func (src *imageSource) key(login credentials) string {
	h := sha256.New()
	fmt.Fprintf(h, "%q", src.Ref)
	for _, c := range login {
		fmt.Fprintf(h, " %q %q", c.username, c.password)
	}
	return fmt.Sprintf("%x", h.Sum(nil))[:32]
}

// imageID is a container's image as its status names it: by the digest of its
// manifest, or else that of the image file.
func imageID(image, kind, hex string) string {
	if src, err := findImage(image, nil); err == nil && kind == "manifest" && src.Repository != "" {
		return src.Repository + "@sha256:" + hex
	}
	return "sha256:" + hex
}

// pullScript is the data of pull.sh.tmpl, which brings images into the cache.
type pullScript struct {
	Runtime string
	Prefix  string // of the names of the runtime's own variables
	// Patience is how many seconds the beat of a lock may stand still.
	Patience int
	LimitKiB int64 // of the cache; 0: none
}

func newPullScript(runtime string, limit int64) pullScript {
	prefix, _ := strings.CutSuffix(envPrefix(runtime), "ENV_")
	return pullScript{Runtime: runtime, Prefix: prefix + "_", Patience: 120, LimitKiB: (limit + 1023) / 1024}
}

// maxNodeImages is how many images a Node shows, the largest ones: the kubelet's
// --node-status-max-images.
const maxNodeImages = 50

// imageFacts are the first lines of a ref.KEY of the cache, joined by a blank.
var imageFacts = regexp.MustCompile(`^(\S+) hex=([0-9a-f]{64}) kind=(manifest|file) size=([0-9]{1,15})$`)

// nodeImages are the images of the cache as a Node shows them: by digest, then by
// their other names.
func nodeImages(lines []string) []v1.ContainerImage {
	byID := map[string]*v1.ContainerImage{}
	for _, line := range lines {
		m := imageFacts.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		src, err := findImage(m[1], nil)
		if err != nil {
			continue
		}
		id := imageID(m[1], m[3], m[2])
		image := byID[id]
		if image == nil {
			size, _ := strconv.ParseInt(m[4], 10, 64)
			image = &v1.ContainerImage{Names: []string{id}, SizeBytes: size}
			byID[id] = image
		}
		name := m[1]
		if src.Repository != "" {
			version := src.Manifest[strings.LastIndexByte(src.Manifest, '/')+1:]
			if name = src.Repository + ":" + version; strings.Contains(version, ":") {
				name = src.Repository + "@" + version
			}
		}
		if !slices.Contains(image.Names, name) {
			image.Names = append(image.Names, name)
		}
	}
	var images []v1.ContainerImage
	for _, id := range slices.Sorted(maps.Keys(byID)) {
		slices.Sort(byID[id].Names[1:])
		images = append(images, *byID[id])
	}
	slices.SortStableFunc(images, func(a, b v1.ContainerImage) int { return cmp.Compare(b.SizeBytes, a.SizeBytes) })
	return images[:min(len(images), maxNodeImages)]
}
