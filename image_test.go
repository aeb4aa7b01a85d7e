package knoc

import (
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestFindImage(t *testing.T) {
	t.Parallel()
	digest := "sha256:" + strings.Repeat("0a", 32)
	insecure := []string{"10.77.0.1:5000", "localhost"}
	tests := []struct {
		image, want string
		plainHTTP   bool
	}{
		{"busybox", "docker://busybox", false},
		{"busybox:1.36", "docker://busybox:1.36", false},
		{"library/busybox", "docker://library/busybox", false},
		{"docker://busybox", "docker://busybox", false},
		{"10.77.0.1:5000/app:1", "docker://10.77.0.1:5000/app:1", true},
		{"docker://10.77.0.1:5000/a/b__c/d-e.f", "docker://10.77.0.1:5000/a/b__c/d-e.f", true},
		{"10.77.0.1/app", "docker://10.77.0.1/app", false},
		{"localhost/app", "docker://localhost/app", true},
		{"Registry.example.org:443/app", "docker://Registry.example.org:443/app", false},
		{"[2001:db8::1]:5000/app", "docker://[2001:db8::1]:5000/app", false},
		{"r.io/app@" + digest, "docker://r.io/app@" + digest, false},
		{"r.io/app:v1@" + digest, "docker://r.io/app@" + digest, false},
		{"app:v1@" + digest, "docker://app@" + digest, false},
		{"oras://localhost/app:1", "oras://localhost/app:1", true},
		{"library://user/collection/app:1", "library://user/collection/app:1", false},
		{"shub://user/app", "shub://user/app", false},
		{"/apps/x_1/im-age.sif", "/apps/x_1/im-age.sif", false},
		{"file:///apps/image.sif", "/apps/image.sif", false},
		{"file:/apps/image.sif", "/apps/image.sif", false},
	}
	for _, tc := range tests {
		src, err := findImage(tc.image, insecure)
		got, plainHTTP := src.Ref+src.Path, src.PlainHTTP
		if err != nil || got != tc.want || plainHTTP != tc.plainHTTP {
			t.Errorf("findImage(%q) is %q, %v, %v; want %q, %v", tc.image, got, plainHTTP, err, tc.want, tc.plainHTTP)
		}
	}
	for _, image := range []string{
		"", " ", "Busybox", "busy box", "busybox:", "busybox:a b", "busybox@sha256:12", "busybox;id", "busybox\n", "$(id)", "-v", "--nv",
		"docker://", "docker:///x", "docker-archive://x", "instance://x", "http://x/y.sif",
		"oras://", "oras://-x", "library://a b", "file:image.sif", "file://image.sif", "/apps/a b.sif", "/apps/\n.sif", "./image.sif", "a//b", "a/", "/",
	} {
		if got, err := findImage(image, nil); err == nil {
			t.Errorf("findImage(%q) is %+v, want an error", image, got)
		}
	}
}

// What a registry is asked, and what an image id names.
func TestImageRegistry(t *testing.T) {
	t.Parallel()
	const digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	hub := "https://registry-1.docker.io/v2/"
	for _, tc := range []struct{ image, manifest, byDigest, id string }{
		{"busybox", hub + "library/busybox/manifests/latest", "docker://busybox@", "docker.io/library/busybox"},
		{"docker.io/busybox:1", hub + "library/busybox/manifests/1", "docker://docker.io/busybox@", "docker.io/library/busybox"},
		{"a/b:1@" + digest, hub + "a/b/manifests/" + digest, "docker://a/b@", "docker.io/a/b"},
		{"10.77.0.1:5000/app", "http://10.77.0.1:5000/v2/app/manifests/latest", "docker://10.77.0.1:5000/app@", "10.77.0.1:5000/app"},
		{"quay.io/a/b/c:x", "https://quay.io/v2/a/b/c/manifests/x", "docker://quay.io/a/b/c@", "quay.io/a/b/c"},
		{"oras://ghcr.io/a/b:x", "https://ghcr.io/v2/a/b/manifests/x", "", "ghcr.io/a/b"},
		{"library://a/b/c:x", "", "", ""},
	} {
		src, err := findImage(tc.image, []string{"10.77.0.1:5000"})
		if err != nil {
			t.Fatal(err)
		}
		if src.Manifest != tc.manifest || src.ByDigest != tc.byDigest || src.Repository != tc.id {
			t.Errorf("%s: %+v, want %+v", tc.image, src, tc)
		}
		want := digest
		if tc.id != "" {
			want = tc.id + "@" + digest
		}
		if got := imageID(tc.image, "manifest", digest[7:]); got != want {
			t.Errorf("the id of %s is %q, want %q", tc.image, got, want)
		}
		if got := imageID(tc.image, "file", digest[7:]); got != digest {
			t.Errorf("the id of a file of %s is %q", tc.image, got)
		}
	}
	for image, want := range map[string]v1.PullPolicy{"a": v1.PullAlways, "a:latest": v1.PullAlways, "r:5000/a": v1.PullAlways, "a:1": v1.PullIfNotPresent, "a@" + digest: v1.PullIfNotPresent, "library://a/b/c": v1.PullIfNotPresent} {
		if got := pullPolicy(&v1.Container{Image: image}); got != want {
			t.Errorf("%s: %s, want %s", image, got, want)
		}
	}
}

func TestImageRewrites(t *testing.T) {
	t.Parallel()
	const digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	rules, err := checkRewrites([]string{"docker.io=mirror.example.org/hub", "docker.io/library=m.io:5000/lib", "quay.io/a=localhost"})
	if err != nil {
		t.Fatal(err)
	}
	cfg := scriptConfig{ImageRewrites: rules, ImageRoot: "/apps/images/", InsecureRegistries: []string{"m.io:5000"}}
	for image, want := range map[string]string{
		"busybox": "docker://m.io:5000/lib/busybox:latest", "a/b:1": "docker://mirror.example.org/hub/a/b:1", "docker://docker.io/a/b@" + digest: "docker://mirror.example.org/hub/a/b@" + digest,
		"quay.io/a/b": "docker://localhost/b:latest", "quay.io/ab/c": "docker://quay.io/ab/c", "oras://docker.io/a:1": "oras://docker.io/a:1", "/x.sif": "/x.sif", "file:sub/x.sif": "/apps/images/sub/x.sif",
	} {
		src, err := cfg.source(image)
		if got := src.Ref + src.Path; err != nil || got != want {
			t.Errorf("%s is looked for at %q, want %q: %v", image, got, want, err)
		}
		if src.PlainHTTP != strings.Contains(want, "m.io:5000") {
			t.Errorf("%s: plain HTTP: %v", image, src.PlainHTTP)
		}
	}
	for _, rule := range []string{"", "a", "docker.io", "docker.io=", "=m.io", "docker.io=M/x y", "busybox=m.io"} {
		if _, err := checkRewrites([]string{rule}); err == nil {
			t.Errorf("the rule %q was taken", rule)
		}
	}
}

func TestNodeImages(t *testing.T) {
	t.Parallel()
	a, b := strings.Repeat("a", 64), strings.Repeat("b", 64)
	got := nodeImages([]string{
		"busybox hex=" + a + " kind=manifest size=10", "docker.io/library/busybox:1 hex=" + a + " kind=manifest size=10", "busybox hex=" + a + " kind=manifest size=10",
		"library://u/c/app:1 hex=" + b + " kind=file size=30", "broken", "x hex=$(id) kind=file size=1",
	})
	want := []v1.ContainerImage{
		{Names: []string{"sha256:" + b, "library://u/c/app:1"}, SizeBytes: 30},
		{Names: []string{"docker.io/library/busybox@sha256:" + a, "docker.io/library/busybox:1", "docker.io/library/busybox:latest"}, SizeBytes: 10},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// What was not used for longest is removed when there is too much, and nothing that
// is in some pod's directory.
func TestImageCacheLimit(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		b := newBase(t)
		images := filepath.Join(b.dir, "../images")
		hex := map[string]string{}
		for i, name := range []string{"r/old", "r/used", "r/older", "r/young"} {
			hex[name] = b.cached(t, name)
			sif := filepath.Join(images, "sha256."+hex[name]+".sif")
			if err := os.WriteFile(sif, make([]byte, 40<<10), 0o600); err != nil {
				t.Fatal(err)
			}
			used := strings.TrimSuffix(sif, "sif") + "used"
			if err := os.WriteFile(used, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			at := time.Now().Add(time.Duration(map[int]int{0: -20, 1: -40, 2: -30, 3: -10}[i]) * time.Minute)
			if err := os.Chtimes(used, at, at); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Link(filepath.Join(images, "sha256."+hex["r/used"]+".sif"), filepath.Join(b.dir, "in-use")); err != nil {
			t.Fatal(err)
		}
		w := stageScript(t, b, scriptPod(v1.RestartPolicyNever, withImage(shContainer("a", ":"), "r/new")), nil)
		pull, err := render("pull.sh.tmpl", newPullScript("apptainer", 90<<10))
		if err != nil {
			t.Fatal(err)
		}
		w.write("run/pull.sh", pull)
		w.start(shell, "7")
		w.end()
		w.order("pull a", "exit a 0 0", "done 0")
		for name, want := range map[string]bool{"r/old": false, "r/used": true, "r/older": false, "r/young": true} {
			_, sifErr := os.Stat(filepath.Join(images, "sha256."+hex[name]+".sif"))
			src, _ := findImage(name, nil)
			_, refErr := os.Stat(filepath.Join(images, "ref."+src.key(nil)))
			if (sifErr == nil) != want || (refErr == nil) != want {
				t.Errorf("%s is there: %v, %v; want %v", name, sifErr == nil, refErr == nil, want)
			}
		}
	})
}

func withImage(c v1.Container, image string) v1.Container {
	c.Image = image
	return c
}

// of are the words of a container's facts.
func of(facts []string, container string) string {
	var words []string
	for _, f := range facts {
		if word := strings.Fields(f); len(word) > 1 && word[1] == container {
			words = append(words, word[0])
		}
	}
	return strings.Join(words, " ")
}

// However many containers of however many pods start at once, each image is pulled
// once.
func TestPodScriptFetch(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		b := newBase(t)
		var pods []*scriptRun
		for _, uid := range []string{"u1", "u2", "u3"} {
			pod := scriptPod(v1.RestartPolicyNever, withImage(shContainer("a", ":"), "r/one"), withImage(shContainer("b", ":"), "r/one"), withImage(shContainer("c", ":"), "r/other"), shContainer("d", ":"))
			pod.UID = types.UID(uid)
			w := stageScript(t, b, pod, nil)
			w.start(shell, "7")
			pods = append(pods, w)
		}
		for _, w := range pods {
			if code := w.end(); code != 0 {
				t.Errorf("exit code %d; stderr: %s", code, w.stderr.String())
			}
			if log := w.read("log/a.0") + w.read("log/b.0") + w.read("log/c.0"); log != "" {
				t.Errorf("logs: %s", log)
			}
			facts := w.facts("journal.0")
			for _, c := range []string{"a", "b", "c"} {
				if got := of(facts, c); got != "pull pulled start exit" && got != "start exit" {
					t.Errorf("container %s: %s", c, got)
				}
			}
			if slices.Contains(facts, "pull d") {
				t.Errorf("an image of the cache was pulled: %q", facts)
			}
			if journal := w.read("journal.0"); strings.Count(journal, " digest a manifest ") != 1 {
				t.Errorf("no digest: %s", journal)
			}
		}
		pulls := strings.Fields(pods[0].read("../../pulls"))
		slices.Sort(pulls)
		if diff := cmp.Diff([]string{"docker://r/one", "docker://r/other"}, pulls); diff != "" {
			t.Errorf("pulls (-want +got):\n%s", diff)
		}
		left, _ := filepath.Glob(filepath.Join(b.dir, "../images/[^rs]*"))
		if len(left) > 0 {
			t.Errorf("left in the cache: %q", left)
		}
	})
}

// A pull that fails is tried again and again; a stop ends it.
func TestPodScriptFetchFails(t *testing.T) {
	t.Parallel()
	run := func(t *testing.T, shell []string, image string, policy v1.PullPolicy) *scriptRun {
		pod := scriptPod(v1.RestartPolicyNever, shContainer("a", ":"), shContainer("b", ":"))
		pod.Spec.Containers[0].Image, pod.Spec.Containers[0].ImagePullPolicy = image, policy
		w := stageScript(t, newBase(t), pod, nil)
		w.start(shell, "7")
		return w
	}
	tests := []struct {
		name, image string
		policy      v1.PullPolicy
		do          func(w *scriptRun)
		check       func(w *scriptRun)
	}{
		{"missing", "r/missing", v1.PullIfNotPresent, func(w *scriptRun) {
			w.await("pullwait a 2")
			w.signal(syscall.SIGTERM)
		}, func(w *scriptRun) {
			if got := of(w.facts("journal.0"), "a"); !strings.HasPrefix(got, "pull pullfailed pullwait pull pullfailed pullwait") || w.read("msg/a.pull") != "no such image\n" || w.read("log/a.0") != "" {
				w.t.Errorf("text %q, log %q, journal %q", w.read("msg/a.pull"), w.read("log/a.0"), got)
			}
			w.order("exit b 0 0", "pullwait a 2")
		}},
		{"never", "r/one", v1.PullNever, func(w *scriptRun) {
			w.await("neverpull a")
			w.base.cached(w.t, "r/one") // healed
		}, func(w *scriptRun) {
			w.order("neverpull a", "start a 0", "exit a 0 0", "done 0")
			w.never("pull a")
		}},
		{"flaky", "r/flaky", v1.PullIfNotPresent, nil, func(w *scriptRun) { w.order("pullfailed a 255", "pull a", "exit a 0 0", "done 0") }},
		{"too big for the node", "r/big", v1.PullIfNotPresent, nil, func(w *scriptRun) {
			w.order("pull a", "exit a 0 0", "done 0")
			w.never("pullfailed a 255")
		}},
		{"stopped", "r/slow", v1.PullIfNotPresent, func(w *scriptRun) { // leaves no lock
			w.await("exit b 0 0")
			w.until("pulling", func() bool { return w.read("msg/a.pull") == "pulling\n" })
			w.signal(syscall.SIGTERM)
		}, func(w *scriptRun) {
			w.order("stopping 30", "done 1")
			w.never("start a 0")
		}},
	}
	eachShell(t, func(t *testing.T, shell []string) {
		for _, tc := range tests {
			t.Run(tc.name, func(t *testing.T) {
				t.Parallel()
				w := run(t, shell, tc.image, tc.policy)
				if tc.do != nil {
					tc.do(w)
				}
				w.end()
				tc.check(w)
				if left, _ := filepath.Glob(filepath.Join(w.base.dir, "../images/[^rs]*")); len(left) > 0 {
					t.Errorf("left in the cache: %q", left)
				}
			})
		}
	})
}

// Always asks for the digest, at each start of the container, and pulls what is not
// there; what is there is not pulled again by another name.
func TestPullAlways(t *testing.T) {
	t.Parallel()
	hex := func(c string) string { return strings.Repeat(c, 64) }
	eachShell(t, func(t *testing.T, shell []string) {
		run := func(b base, uid, image string, policy v1.PullPolicy, digest string) []string {
			c := withImage(shContainer("a", ":"), image)
			c.ImagePullPolicy = policy
			pod := scriptPod(v1.RestartPolicyNever, c)
			pod.UID = types.UID(uid)
			w := stageScript(t, b, pod, nil)
			w.write("../../digest", digest)
			w.start(shell, "7")
			if code := w.end(); code != 0 {
				t.Fatalf("exit code %d: %s", code, w.read("journal.0"))
			}
			asked := strings.Fields(w.read("../../asked"))
			pulls := strings.Fields(w.read("../../pulls"))
			for _, line := range strings.Split(w.read("journal.0"), "\n") {
				if _, digest, ok := strings.Cut(line, " digest "); ok {
					return []string{fmt.Sprint(len(asked)), strings.Join(pulls, " "), digest[:len("a manifest 123")]}
				}
			}
			return nil
		}
		b := newBase(t)
		one, two := "docker://r/i@sha256:"+hex("1"), "docker://r/i@sha256:"+hex("2")
		for i, tc := range []struct {
			image  string
			policy v1.PullPolicy
			digest string
			want   []string
		}{
			{"r/i:a", v1.PullAlways, hex("1"), []string{"1", one, "a manifest 111"}},
			{"r/i:a", v1.PullAlways, hex("1"), []string{"2", one, "a manifest 111"}},
			{"r/i:b", v1.PullIfNotPresent, hex("1"), []string{"3", one, "a manifest 111"}}, // by another name
			{"r/i:b", v1.PullIfNotPresent, hex("2"), []string{"3", one, "a manifest 111"}},
			{"r/i:a", v1.PullIfNotPresent, hex("2"), []string{"3", one, "a manifest 111"}},
			{"r/i:a", v1.PullAlways, hex("2"), []string{"4", one + " " + two, "a manifest 222"}},
			{"r/i:b", v1.PullNever, hex("2"), []string{"4", one + " " + two, "a manifest 111"}},
		} {
			if diff := cmp.Diff(tc.want, run(b, fmt.Sprint("u", i), tc.image, tc.policy, tc.digest)); diff != "" {
				t.Errorf("%d (requests, pulls, digest; -want +got):\n%s", i, diff)
			}
		}
	})
}

// The more specific credentials come first, as the kubelet has it.
func TestPullSecrets(t *testing.T) {
	t.Parallel()
	secret := func(kind v1.SecretType, key, text string) *v1.Secret {
		return &v1.Secret{Type: kind, Data: map[string][]byte{key: []byte(text)}}
	}
	auth := base64.StdEncoding.EncodeToString([]byte("bob:p:w\"\\"))
	ring, err := credentialsIn(secret(v1.SecretTypeDockerConfigJson, v1.DockerConfigJsonKey, `{"auths": {
		"r.io": {"username": "host", "password": "1"}, "https://r.io/v2/team": {"auth": "`+auth+`"}, "*.x.io:5000": {"username": "glob"},
		"https://index.docker.io/v1/": {"username": "hub"}, "r.io/other": {"username": "other"}}}`))
	if err != nil {
		t.Fatal(err)
	}
	old, err := credentialsIn(secret(v1.SecretTypeDockercfg, v1.DockerConfigKey, `{"r.io": {"username": "old", "password": "2", "email": "x"}}`))
	if err != nil {
		t.Fatal(err)
	}
	ring = append(ring, old...)
	ring.sort()
	for repository, want := range map[string]string{
		"r.io/team/app": "bob host old", "r.io/app": "host old", "a.x.io:5000/app": "glob", "a.x.io/app": "", "b.a.x.io:5000/app": "", "docker.io/library/app": "hub", "else.io/app": "",
	} {
		var got []string
		for _, c := range ring.lookup(repository) {
			got = append(got, c.username)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %q, want %q", repository, got, want)
		}
	}
	for _, text := range []string{"{", `{"auths": {"r.io": {"auth": "x"}}}`, `{"auths": {"r.io": {"username": "a\nb"}}}`} {
		if got, err := credentialsIn(secret(v1.SecretTypeDockerConfigJson, v1.DockerConfigJsonKey, text)); err == nil {
			t.Errorf("%s: %v, want an error", text, got)
		}
	}
	if ring, err := credentialsIn(&v1.Secret{Type: v1.SecretTypeOpaque}); ring != nil || err != nil {
		t.Errorf("another kind of Secret: %v, %v", ring, err)
	}
}

// Credentials reach the registry and the runtime, and no argument.
func TestPullWithCredentials(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		ring := credentials{{"r.io", "eve", "Wr0ng"}, {"r.io", "al'ice", `se"c\ret $(id)`}}
		pod := scriptPod(v1.RestartPolicyNever, withImage(shContainer("a", ":"), "r.io/one"))
		w := stageScript(t, newBase(t), pod, nil)
		w.write("env/a.pull", string(ring.file()))
		w.write("../bin/curl", "#!/bin/sh\ncat >>../../login\necho \"$*\" >>../../args\nexit 6\n")
		w.write("../bin/apptainer", strings.Replace(stubRuntime, "if [ \"$action\" = pull ]; then", `if [ "$action" = pull ]; then
			echo "$*" >>../../args
			printf '%s:%s\n' "$APPTAINER_DOCKER_USERNAME" "$APPTAINER_DOCKER_PASSWORD" >>../../login
			case $APPTAINER_DOCKER_PASSWORD in Wr0ng) echo "FATAL: denied" >&2; exit 255 ;; esac`, 1))
		w.start(shell, "7")
		w.end()
		w.order("pull a", "exit a 0 0", "done 0")
		w.never("pullfailed a 255")
		want := "user = \"eve:Wr0ng\"\nuser = \"al'ice:se\\\"c\\\\ret $(id)\"\n"
		want += want + "eve:Wr0ng\nal'ice:se\"c\\ret $(id)\n"
		if got := w.read("../../login"); got != want {
			t.Errorf("logins %q, want %q", got, want)
		}
		if args := w.read("../../args"); args == "" || strings.Contains(args, "ret") || strings.Contains(args, "Wr0ng") {
			t.Errorf("arguments: %s", args)
		}
		if journal := w.read("journal.0") + w.read("pod.sh"); strings.Contains(journal, "Wr0ng") {
			t.Error("a password outside of its file")
		}
	})
}

// A lock whose owner is dead is broken: at once on the same machine, else when its
// beat stands still. One that beats is not.
func TestPullLock(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, beat string
		beats      bool
		broken     bool
	}{
		{"of this machine", "HOST 4194305 1 0", false, true},
		{"of another one", "elsewhere 1 1 0", false, true},
		{"without a beat", "", false, true},
		{"that beats", "elsewhere 1 1 0", true, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			eachShell(t, func(t *testing.T, shell []string) {
				pod := scriptPod(v1.RestartPolicyNever, withImage(shContainer("a", ":"), "r/one"))
				w := stageScript(t, newBase(t), pod, nil)
				w.write("run/pull.sh", strings.Replace(w.read("run/pull.sh"), "patience=120", "patience=3", 1))
				src, _ := findImage("r/one", nil)
				lock := filepath.Join(w.base.dir, "../images/lock."+src.key(nil))
				if err := os.Mkdir(lock, 0o700); err != nil {
					t.Fatal(err)
				}
				host, _ := os.Hostname()
				beat := func(text string) {
					if err := os.WriteFile(filepath.Join(lock, "beat"), []byte(text+"\n"), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				if tc.beat != "" {
					beat(strings.Replace(tc.beat, "HOST", host, 1))
				}
				w.start(shell, "7")
				if tc.beats {
					for i := range 12 {
						beat(fmt.Sprintf("elsewhere 1 1 %d", i))
						time.Sleep(500 * time.Millisecond)
					}
					if strings.Contains(w.read("journal.0"), "pulled") {
						t.Errorf("a lock that beats was broken: %s", w.read("journal.0"))
					}
					os.RemoveAll(lock) // its owner has given up
				}
				w.end()
				w.order("pull a", "exit a 0 0", "done 0")
			})
		})
	}
}

// The image's own program, as its configuration has it in JSON.
func TestImageConfig(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("awk"); err != nil {
		t.Skip(err)
	}
	for name, tc := range map[string]struct{ config, want string }{
		"all":     {`{"Labels":{"a":"{\"Cmd\":[]}","b":["x",{"Cmd":["no"]}]},"Cmd":["it's","two \"words\"","back\\slash\nnl","\u003c\u00e9\u20ac\ud83d\ude00\u0026",""],"Entrypoint":["/bin/entry","$(id)"],"Env":["A=b"],"ArgsEscaped":true,"OnBuild":null,"User":"app'x","WorkingDir":"/my work"}`, "/bin/entry|$(id)|it's|two \"words\"|back\\slash\nnl|<é€😀&|||/my work"},
		"command": {` { "Cmd" : [ "sh" ] } `, "sh||/"},
		"entry":   {`{"Entrypoint":["/e"],"Cmd":null}`, "/e||/"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachShell(t, func(t *testing.T, shell []string) {
				c := v1.Container{Name: "a", Image: "r/one", ImagePullPolicy: v1.PullIfNotPresent}
				w := stageScript(t, newBase(t), scriptPod(v1.RestartPolicyNever, c), nil)
				w.write("../../config", tc.config)
				w.patch("exec $carry 'apptainer'", `printf '%s|' "$@"; printf '|%s' "${workdir:-/}"; exit; exec $carry 'apptainer'`)
				w.start(shell, "7")
				w.end()
				if got := w.read("log/a.0"); got != tc.want {
					t.Errorf("got %q, want %q", got, tc.want)
				}
			})
		})
	}
	eachShell(t, func(t *testing.T, shell []string) {
		w := stageScript(t, newBase(t), scriptPod(v1.RestartPolicyNever, v1.Container{Name: "a", Image: "r/one"}), nil)
		w.write("../../config", "{}")
		w.start(shell, "7")
		w.end()
		if log := w.read("log/a.0"); !strings.Contains(log, "no command specified") {
			t.Errorf("log %q", log)
		}
		w.order("start a 0", "exit a 0 128", "done 1")
	})
}
