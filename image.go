package knoc

import (
	"crypto/sha256"
	"fmt"
	"regexp"
	"slices"
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
			return src, fmt.Errorf("image %q: an image file is named by its absolute path on the cluster, of letters, digits and . _ / @ + ~ -", image)
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

// imageWords are how pod.sh gets a container's image: the arguments of fetch after
// the container's name, or nil and the image's path.
func imageWords(c *v1.Container, cfg scriptConfig) (fetch []word, path word, err error) {
	src, err := findImage(c.Image, cfg.InsecureRegistries)
	if err != nil {
		return nil, "", refuse("InvalidImageName", "container %s: %v", c.Name, err)
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
}

func newPullScript(runtime string) pullScript {
	prefix, _ := strings.CutSuffix(envPrefix(runtime), "ENV_")
	return pullScript{Runtime: runtime, Prefix: prefix + "_", Patience: 120}
}
