package knoc

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// credential is what a pull may log in with.
type credential struct {
	registry string // host[:port][/path], the host with wildcards
	username string
	password string
}

// credentials are those of a pod's imagePullSecrets, those of the service
// account among them: the API server adds these to the pod. The more specific
// ones come first (BasicDockerKeyring in pkg/credentialprovider).
type credentials []credential

// pullSecrets reads a pod's imagePullSecrets. A secret that is missing does not
// keep a kubelet from trying to pull either; its name is returned.
func pullSecrets(ctx context.Context, pod *v1.Pod, objs objects) (ring credentials, missing []string, err error) {
	for _, ref := range pod.Spec.ImagePullSecrets {
		if ref.Name == "" {
			continue
		}
		secret, err := objs.Secret(ctx, pod.Namespace, ref.Name)
		if ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
		if err != nil {
			missing = append(missing, ref.Name)
			continue
		}
		more, err := credentialsIn(secret)
		if err != nil {
			return nil, nil, &notYet{"CreateContainerConfigError", fmt.Sprintf("image pull secret %q: %v", ref.Name, err)}
		}
		ring = append(ring, more...)
	}
	ring.sort()
	return ring, missing, nil
}

func (ring credentials) sort() {
	slices.SortStableFunc(ring, func(a, b credential) int { return cmp.Compare(b.registry, a.registry) })
}

// credentialsIn reads a Secret of either of the two types.
func credentialsIn(secret *v1.Secret) (credentials, error) {
	type entry struct{ Username, Password, Auth string }
	var entries map[string]entry
	switch {
	case secret.Type == v1.SecretTypeDockerConfigJson && len(secret.Data[v1.DockerConfigJsonKey]) > 0:
		var file struct{ Auths map[string]entry }
		if err := json.Unmarshal(secret.Data[v1.DockerConfigJsonKey], &file); err != nil {
			return nil, fmt.Errorf("the key %s is not valid JSON", v1.DockerConfigJsonKey) // its text may be a secret
		}
		entries = file.Auths
	case secret.Type == v1.SecretTypeDockercfg && len(secret.Data[v1.DockerConfigKey]) > 0:
		if err := json.Unmarshal(secret.Data[v1.DockerConfigKey], &entries); err != nil {
			return nil, fmt.Errorf("the key %s is not valid JSON", v1.DockerConfigKey)
		}
	}
	var ring credentials
	for registry, e := range entries {
		if e.Auth != "" {
			text, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(strings.TrimSpace(e.Auth), "="))
			user, password, ok := strings.Cut(string(text), ":")
			if err != nil || !ok {
				return nil, fmt.Errorf("the auth of %q is not base64 of username:password", registry)
			}
			e.Username, e.Password = user, password
		}
		if strings.ContainsAny(e.Username+e.Password, "\x00\n\r") {
			return nil, fmt.Errorf("the credentials of %q have a control character", registry)
		}
		if at, ok := registryKey(registry); ok {
			ring = append(ring, credential{at, e.Username, e.Password})
		}
	}
	return ring, nil
}

// registryKey is a registry of a docker config without its scheme and API version.
func registryKey(registry string) (string, bool) {
	if !strings.HasPrefix(registry, "https://") && !strings.HasPrefix(registry, "http://") {
		registry = "https://" + registry
	}
	u, err := url.Parse(registry)
	if err != nil || u.Host == "" {
		return "", false
	}
	for _, version := range []string{"/v1/", "/v2/"} {
		if rest, ok := strings.CutPrefix(u.Path, version); ok {
			u.Path = "/" + rest
		}
	}
	if u.Path == "/" {
		u.Path = ""
	}
	return u.Host + u.Path, true
}

// lookup are the credentials for a repository, host/path. Those of
// index.docker.io serve Docker Hub.
func (ring credentials) lookup(repository string) (found credentials) {
	host, name, _ := strings.Cut(repository, "/")
	for _, c := range ring {
		glob, prefix, _ := strings.Cut(c.registry, "/")
		if sameHost(glob, host) && strings.HasPrefix(name, prefix) {
			found = append(found, c)
		}
	}
	if len(found) == 0 && host == "docker.io" {
		for _, c := range ring {
			if c.registry == "index.docker.io" {
				found = append(found, c)
			}
		}
	}
	return found
}

// sameHost matches a host with its port, part by part.
func sameHost(glob, host string) bool {
	globHost, globPort, _ := strings.Cut(glob, ":")
	name, port, _ := strings.Cut(host, ":")
	globs, names := strings.Split(globHost, "."), strings.Split(name, ".")
	if globPort != port || len(globs) != len(names) {
		return false
	}
	for i := range globs {
		if ok, err := path.Match(globs[i], names[i]); !ok || err != nil {
			return false
		}
	}
	return true
}

// file is env/<container>.pull, which pull.sh reads: shell text with a function
// that sets what the runtime and curl want of the credential with that number.
func (ring credentials) file() []byte {
	var b strings.Builder
	b.WriteString("# What an image is pulled with, written by knoc. These are secrets.\ncredential() {\n\tcase $1 in\n")
	escape := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\t", `\t`, "\v", `\v`)
	for i, c := range ring {
		fmt.Fprintf(&b, "\t%d) username=%s password=%s login=%s ;;\n", i+1, quote(c.username), quote(c.password),
			quote(`user = "`+escape.Replace(c.username+":"+c.password)+`"`))
	}
	b.WriteString("\t*) return 1 ;;\n\tesac\n}\n")
	return []byte(b.String())
}

// pullFiles are the credentials that each of the containers' images is pulled
// with. A file that is there already is replaced, by one without any if need be.
func pullFiles(pod *v1.Pod, containers []*v1.Container, cfg scriptConfig) (files []file) {
	if len(pod.Spec.ImagePullSecrets) == 0 {
		return nil
	}
	for _, c := range containers {
		if src, err := cfg.source(c.Image); err == nil {
			files = append(files, file{Name: "env/" + c.Name + ".pull", Mode: 0o600, Body: cfg.Credentials.lookup(src.Repository).file()})
		}
	}
	return files
}
