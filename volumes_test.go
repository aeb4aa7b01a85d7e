package knoc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"
)

func volumeObjects() *fakeObjects {
	return &fakeObjects{
		configMaps: map[string]*v1.ConfigMap{
			"cm": {
				Data:       map[string]string{"a.conf": "line\nline", "b": ""},
				BinaryData: map[string][]byte{"bin": {0, 1, 0xff, '\n'}},
			},
			"empty":            {},
			"up":               {Data: map[string]string{"../../evil": "x"}},
			"kube-root-ca.crt": {Data: map[string]string{"ca.crt": "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"}},
		},
		secrets: map[string]*v1.Secret{
			"s": {Data: map[string][]byte{"user": []byte("u"), "password": []byte("p\x00\xffw")}},
		},
	}
}

// testSpec reads a pod spec from YAML; a pod without containers gets one.
func testSpec(t *testing.T, text string) *v1.Pod {
	t.Helper()
	pod := testPod()
	pod.Spec.Containers = nil
	if err := yaml.UnmarshalStrict([]byte(text), &pod.Spec); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	if len(pod.Spec.Containers) == 0 {
		pod.Spec.Containers = []v1.Container{{Name: "c", Image: "busybox", Resources: v1.ResourceRequirements{Limits: v1.ResourceList{"memory": resource.MustParse("3Mi")}}}}
	}
	return pod
}

var hashName = regexp.MustCompile(`\.\.[0-9a-f]{16}`)

// showFiles writes one line a file, with # for the hash of a volume's content.
func showFiles(files []file) []string {
	var lines []string
	for _, f := range files {
		s := fmt.Sprintf("%s %04o", f.Name, f.Mode.Perm())
		switch {
		case f.Mode.IsDir():
			s = fmt.Sprintf("%s/ %04o", f.Name, f.Mode.Perm())
		case f.Mode&fs.ModeSymlink != 0:
			s = fmt.Sprintf("%s -> %s", f.Name, f.Link)
		default:
			s += fmt.Sprintf(" %q", f.Body)
		}
		lines = append(lines, hashName.ReplaceAllString(s, "#"))
	}
	return lines
}

func TestStageVolumes(t *testing.T) {
	for _, tc := range []struct {
		name, spec string
		want       []string
	}{
		{"none", `{}`, nil},
		{"emptyDir", `volumes: [{name: v, emptyDir: {}}, {name: w}]`, []string{"vol/v/ 0700", "vol/w/ 0700"}},
		{"configMap, all keys", `volumes: [{name: v, configMap: {name: cm}}]`, []string{
			"vol/v/ 0700", "vol/v/#/ 0700",
			`vol/v/#/a.conf 0644 "line\nline"`, `vol/v/#/b 0644 ""`, `vol/v/#/bin 0644 "\x00\x01\xff\n"`,
			"vol/v/..data -> #", "vol/v/a.conf -> ..data/a.conf", "vol/v/b -> ..data/b", "vol/v/bin -> ..data/bin"}},
		{"configMap without keys", `volumes: [{name: v, configMap: {name: empty}}]`, []string{"vol/v/ 0700", "vol/v/#/ 0700", "vol/v/..data -> #"}},
		{"items, nested paths, modes", `volumes: [{name: v, configMap: {name: cm, defaultMode: 0440, items: [{key: a.conf, path: etc/app/a, mode: 0400}, {key: bin, path: etc/bin}, {key: b, path: z, mode: 0755}, {key: b, path: etc/./app//b}]}}]`, []string{
			"vol/v/ 0700", "vol/v/#/ 0700", "vol/v/#/etc/ 0700", "vol/v/#/etc/app/ 0700",
			`vol/v/#/etc/app/a 0400 "line\nline"`, `vol/v/#/etc/app/b 0440 ""`, `vol/v/#/etc/bin 0440 "\x00\x01\xff\n"`, `vol/v/#/z 0755 ""`,
			"vol/v/..data -> #", "vol/v/etc -> ..data/etc", "vol/v/z -> ..data/z"}},
		{"secret", `volumes: [{name: v, secret: {secretName: s, defaultMode: 0400}}]`, []string{
			"vol/v/ 0700", "vol/v/#/ 0700", `vol/v/#/password 0400 "p\x00\xffw"`, `vol/v/#/user 0400 "u"`,
			"vol/v/..data -> #", "vol/v/password -> ..data/password", "vol/v/user -> ..data/user"}},
		{"optional objects", `volumes: [{name: v, configMap: {name: gone, optional: true}}, {name: w, secret: {secretName: gone, optional: true, items: [{key: k, path: p}]}}]`, []string{
			"vol/v/ 0700", "vol/v/#/ 0700", "vol/v/..data -> #", "vol/w/ 0700", "vol/w/#/ 0700", "vol/w/..data -> #"}},
		{"optional keys", `volumes: [{name: v, secret: {secretName: s, optional: true, items: [{key: gone, path: x}, {key: user, path: yy}]}}]`, []string{
			"vol/v/ 0700", "vol/v/#/ 0700", `vol/v/#/yy 0644 "u"`, "vol/v/..data -> #", "vol/v/yy -> ..data/yy"}},
		{"downwardAPI", `volumes: [{name: v, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}, {path: d/name, mode: 0600, fieldRef: {fieldPath: metadata.name}}, {path: mem, resourceFieldRef: {containerName: c, resource: limits.memory, divisor: 1Mi}}, {path: cpu, resourceFieldRef: {containerName: c, resource: limits.cpu}}]}}]`, []string{
			"vol/v/ 0700", "vol/v/#/ 0700", `vol/v/#/cpu 0644 "8"`, "vol/v/#/d/ 0700", `vol/v/#/d/name 0600 "web-0"`,
			`vol/v/#/labels 0644 "app=\"web\"\ntier/x.y=\"a\\\"b\\nc\""`, `vol/v/#/mem 0644 "3"`,
			"vol/v/..data -> #", "vol/v/cpu -> ..data/cpu", "vol/v/d -> ..data/d", "vol/v/labels -> ..data/labels", "vol/v/mem -> ..data/mem"}},
		{"kube-api-access", `volumes: [{name: v, projected: {defaultMode: 0644, sources: [{serviceAccountToken: {expirationSeconds: 3607, path: token}}, {configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}}, {downwardAPI: {items: [{path: namespace, fieldRef: {apiVersion: v1, fieldPath: metadata.namespace}}]}}]}}]`, []string{
			"vol/v/ 0700", "vol/v/#/ 0700",
			`vol/v/#/ca.crt 0644 "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"`, `vol/v/#/namespace 0644 "ns"`, `vol/v/#/token 0644 "token-for-"`,
			"vol/v/..data -> #", "vol/v/ca.crt -> ..data/ca.crt", "vol/v/namespace -> ..data/namespace", "vol/v/token -> ..data/token"}},
		{"projected: the later source wins", `volumes: [{name: v, projected: {defaultMode: 0600, sources: [{secret: {name: s, items: [{key: user, path: x}]}}, {configMap: {name: cm, items: [{key: a.conf, path: x, mode: 0640}]}}, {secret: {name: gone, optional: true}}, {configMap: {name: gone, optional: true}}]}}]`, []string{
			"vol/v/ 0700", "vol/v/#/ 0700", `vol/v/#/x 0640 "line\nline"`, "vol/v/..data -> #", "vol/v/x -> ..data/x"}},
		{"nested mount points", `{volumes: [{name: v, emptyDir: {}}, {name: w, configMap: {name: cm, items: [{key: b, path: b}]}}, {name: x, emptyDir: {}}], initContainers: [{name: i, volumeMounts: [{name: x, mountPath: /data/deep/er}, {name: v, mountPath: /data/}]}], containers: [{name: c, volumeMounts: [{name: v, mountPath: /data}, {name: w, mountPath: /data/conf}, {name: x, mountPath: /data/conf/x}, {name: x, mountPath: /data/conf/b}, {name: x, mountPath: /database}]}]}`, []string{
			"vol/v/ 0700", "vol/v/conf/ 0700", "vol/v/deep/ 0700", "vol/v/deep/er/ 0700",
			"vol/w/ 0700", "vol/w/#/ 0700", `vol/w/#/b 0644 ""`, "vol/w/..data -> #", "vol/w/b -> ..data/b", "vol/w/x/ 0700",
			"vol/x/ 0700"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pod := testSpec(t, tc.spec)
			node := nodeFacts{Allocatable: v1.ResourceList{"cpu": resource.MustParse("8")}}
			files, _, err := stageVolumes(t.Context(), pod, volumeObjects(), node)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, showFiles(files)); diff != "" {
				t.Fatalf("(-want +got):\n%s", diff)
			}
			writeFiles(t, t.TempDir(), files)
			again, _, err := stageVolumes(t.Context(), pod, volumeObjects(), node)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(files, again); diff != "" {
				t.Fatalf("staging the same again is not the same:\n%s", diff)
			}
		})
	}
}

// writeFiles makes the files in their order, as tar would; nothing exists yet,
// no parent is missing, and no path leaves through a link.
func writeFiles(t *testing.T, root string, files []file) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(root, "vol"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		name := filepath.Join(root, f.Name)
		if real, err := filepath.EvalSymlinks(filepath.Dir(name)); err != nil || real != filepath.Dir(name) {
			t.Fatalf("%s: its directory is %q, %v", f.Name, real, err)
		}
		var err error
		switch {
		case f.Mode.IsDir():
			err = os.Mkdir(name, f.Mode.Perm())
		case f.Mode&fs.ModeSymlink != 0:
			err = os.Symlink(f.Link, name)
		default:
			err = os.WriteFile(name, f.Body, f.Mode.Perm())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// What a container reads through the links is what the object holds, and a new
// content lands in a new directory, so that renaming ..data swaps all of it.
func TestVolumeThroughLinks(t *testing.T) {
	pod := testSpec(t, `volumes: [{name: v, configMap: {name: cm, items: [{key: a.conf, path: etc/a}, {key: bin, path: bin}]}}]`)
	objs, root := volumeObjects(), t.TempDir()
	files, _, err := stageVolumes(t.Context(), pod, objs, nodeFacts{})
	if err != nil {
		t.Fatal(err)
	}
	writeFiles(t, root, files)
	for name, want := range map[string]string{"etc/a": "line\nline", "bin": "\x00\x01\xff\n"} {
		if got, err := os.ReadFile(filepath.Join(root, "vol/v", name)); err != nil || string(got) != want {
			t.Fatalf("%s: %q, %v", name, got, err)
		}
	}
	seen := map[string]bool{files[1].Name: true}
	for _, change := range []func(*v1.Pod, *v1.ConfigMap){
		func(_ *v1.Pod, cm *v1.ConfigMap) { cm.Data["a.conf"] = "new" },
		func(_ *v1.Pod, cm *v1.ConfigMap) { cm.BinaryData["bin"] = nil },
		func(p *v1.Pod, _ *v1.ConfigMap) { p.Spec.Volumes[0].ConfigMap.Items[0].Path = "etc/b" },
		func(p *v1.Pod, _ *v1.ConfigMap) { p.Spec.Volumes[0].ConfigMap.DefaultMode = new(int32(0o400)) },
	} {
		change(pod, objs.configMaps["cm"])
		if files, _, err = stageVolumes(t.Context(), pod, objs, nodeFacts{}); err != nil {
			t.Fatal(err)
		}
		if seen[files[1].Name] {
			t.Fatalf("a change left the directory %s", files[1].Name)
		}
		seen[files[1].Name] = true
	}
	// A key that is not projected changes nothing.
	objs.configMaps["cm"].Data["other"] = "x"
	if files, _, err = stageVolumes(t.Context(), pod, objs, nodeFacts{}); err != nil || !seen[files[1].Name] {
		t.Fatalf("%v, %v", files[1], err)
	}
}

func TestStageVolumesErrors(t *testing.T) {
	const setUp = `FailedMount: MountVolume.SetUp failed for volume "v" : `
	for _, tc := range []struct {
		name, spec, want string
		later            bool
	}{
		{"configMap", `volumes: [{name: v, configMap: {name: gone}}]`, setUp + `configmap "gone" not found`, true},
		{"configMap key", `volumes: [{name: v, configMap: {name: cm, items: [{key: k, path: p}]}}]`, setUp + `configmap references non-existent config key: k`, true},
		{"secret", `volumes: [{name: v, secret: {secretName: gone, optional: false}}]`, setUp + `secret "gone" not found`, true},
		{"secret key", `volumes: [{name: v, secret: {secretName: s, items: [{key: k, path: p}]}}]`, setUp + `references non-existent secret key: k`, true},
		{"projected secret", `volumes: [{name: v, projected: {sources: [{secret: {name: gone}}]}}]`, setUp + `secret "gone" not found`, true},
		{"service account", `{serviceAccountName: gone, volumes: [{name: v, projected: {sources: [{serviceAccountToken: {path: t}}]}}]}`, setUp + `failed to fetch token: serviceaccounts "gone" not found`, true},
		{"kind", `volumes: [{name: v, iscsi: {lun: 1, iqn: a, targetPortal: b}}]`, `UnsupportedVolume: volume v: its kind is not supported`, false},
		{"projected kind", `volumes: [{name: v, projected: {sources: [{clusterTrustBundle: {path: p}}]}}]`, `source 0`, false},
		{"key climbs out", `volumes: [{name: v, configMap: {name: up}}]`, `the path "../../evil"`, false},
		{"path climbs out", `volumes: [{name: v, configMap: {name: cm, items: [{key: b, path: a/../../b}]}}]`, `must not contain ".."`, false},
		{"absolute path", `volumes: [{name: v, configMap: {name: cm, items: [{key: b, path: /etc/passwd}]}}]`, `is absolute`, false},
		{"the layout's own name", `volumes: [{name: v, configMap: {name: cm, items: [{key: b, path: ..data}]}}]`, `must not start with ".."`, false},
		{"the layout's own name, hidden", `volumes: [{name: v, configMap: {name: cm, items: [{key: b, path: ./..data/x}]}}]`, `must not start with ".."`, false},
		{"empty path", `volumes: [{name: v, configMap: {name: cm, items: [{key: b, path: ""}]}}]`, `names no file`, false},
		{"dot", `volumes: [{name: v, configMap: {name: cm, items: [{key: b, path: ./}]}}]`, `names no file`, false},
		{"NUL", `volumes: [{name: v, configMap: {name: cm, items: [{key: b, path: "a\0b"}]}}]`, `NUL`, false},
		{"long name", `volumes: [{name: v, configMap: {name: cm, items: [{key: b, path: ` + strings.Repeat("x", 256) + `}]}}]`, `longer than 255`, false},
		{"long path", `volumes: [{name: v, configMap: {name: cm, items: [{key: b, path: ` + strings.Repeat("x/", 2048) + `y}]}}]`, `longer than 4096`, false},
		{"file and directory", `volumes: [{name: v, configMap: {name: cm, items: [{key: b, path: a/b}, {key: b, path: a}]}}]`, `"a" is a file`, false},
		{"downwardAPI address", `volumes: [{name: v, downwardAPI: {items: [{path: p, fieldRef: {fieldPath: status.podIP}}]}}]`, `fieldPath "status.podIP"`, false},
		{"downwardAPI container", `volumes: [{name: v, downwardAPI: {items: [{path: p, resourceFieldRef: {resource: limits.cpu}}]}}]`, `containerName is required`, false},
		{"downwardAPI nothing", `volumes: [{name: v, downwardAPI: {items: [{path: p}]}}]`, `neither fieldRef`, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			files, _, err := stageVolumes(t.Context(), testSpec(t, tc.spec), volumeObjects(), nodeFacts{})
			checkError(t, err, tc.want, tc.later)
			if files != nil {
				t.Fatalf("files beside an error: %v", files)
			}
		})
	}

	objs := volumeObjects()
	objs.broken = errors.New("dial tcp: connection refused")
	pod := testSpec(t, `volumes: [{name: v, secret: {secretName: s, optional: true}}]`)
	_, _, err := stageVolumes(t.Context(), pod, objs, nodeFacts{})
	checkError(t, err, setUp+"dial tcp: connection refused", true)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := stageVolumes(ctx, pod, objs, nodeFacts{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v after the context ended", err)
	}
}

func TestTokenRequest(t *testing.T) {
	objs := volumeObjects()
	_, _, err := stageVolumes(t.Context(), testSpec(t, `volumes: [{name: v, projected: {sources: [{serviceAccountToken: {path: a}}, {serviceAccountToken: {path: b, audience: vault, expirationSeconds: 7200}}]}}]`), objs, nodeFacts{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"/3600", "vault/7200"}, objs.tokens); diff != "" {
		t.Fatal(diff)
	}
}

func TestMountsOf(t *testing.T) {
	const volumes = `volumes: [{name: e, emptyDir: {}}, {name: cm, configMap: {name: x}}, {name: s, secret: {secretName: x}}, {name: p, projected: {}}, {name: d, downwardAPI: {}}], `
	mounts := func(list string) ([]mount, error) {
		pod := testSpec(t, "{"+volumes+"containers: [{name: c, volumeMounts: ["+list+"]}]}")
		return mountsOf(pod, &pod.Spec.Containers[0])
	}
	got, err := mounts(`{name: s, mountPath: /data/secret/, readOnly: false}, {name: e, mountPath: /data}, {name: cm, mountPath: etc/app}, {name: p, mountPath: /p/./x//y}, {name: d, mountPath: /d}, {name: e, mountPath: /ro, readOnly: true}, {name: e, mountPath: "/with space/é'$"}`)
	if err != nil {
		t.Fatal(err)
	}
	want := []mount{{"vol/e", "/data", false, nil}, {"vol/d", "/d", true, nil}, {"vol/e", "/ro", true, nil}, {"vol/s", "/data/secret", true, nil}, {"vol/cm", "/etc/app", true, nil}, {"vol/e", "/with space/é'$", false, nil}, {"vol/p", "/p/x/y", true, nil}}
	for i := range got {
		got[i].Mount = nil
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatal(diff)
	}
	for list, want := range map[string]string{
		`{name: gone, mountPath: /x}`:                             `volume "gone" at "/x" names no volume`,
		`{name: e, mountPath: /}`:                                 "hide the image",
		`{name: e, mountPath: /x/..}`:                             "hide the image",
		`{name: e, mountPath: ""}`:                                "hide the image",
		`{name: e, mountPath: "/a:b"}`:                            "bind option",
		`{name: e, mountPath: /a, subPath: /x}`:                   `absolute path "/x"`,
		`{name: e, mountPath: /a, subPath: x/../y}`:               `must not contain ".."`,
		`{name: e, mountPath: /a, subPathExpr: ../$(X)}`:          `must not contain ".."`,
		`{name: e, mountPath: /a, subPath: x, subPathExpr: y}`:    `both a subPath and a subPathExpr`,
		`{name: e, mountPath: "/a,b"}`:                            "bind option",
		`{name: e, mountPath: "/a\nb"}`:                           "bind option",
		`{name: e, mountPath: "/a\\b"}`:                           "bind option",
		`{name: e, mountPath: /a}, {name: s, mountPath: /a/}`:     "second one at that path",
		`{name: e, mountPath: /a}, {name: s, mountPath: /b/../a}`: "second one at that path",
	} {
		_, err := mounts(list)
		checkError(t, err, want, false)
	}
}

func TestReadOnce(t *testing.T) {
	objs := volumeObjects()
	objs.configMaps["env"] = &v1.ConfigMap{Data: map[string]string{"A": "a"}}
	once := readOnce(objs)
	pod := testSpec(t, `{volumes: [{name: v, configMap: {name: env}}, {name: w, projected: {sources: [{configMap: {name: env}}, {configMap: {name: gone, optional: true}}, {secret: {name: s}}, {serviceAccountToken: {path: t}}]}}], containers: [{name: c, envFrom: [{configMapRef: {name: env}}, {configMapRef: {name: gone, optional: true}}], env: [{name: B, valueFrom: {secretKeyRef: {name: s, key: user}}}]}]}`)
	if _, _, err := stageVolumes(t.Context(), pod, once, nodeFacts{}); err != nil {
		t.Fatal(err)
	}
	if _, err := stageEnv(t.Context(), pod, &pod.Spec.Containers[0], once, nodeFacts{}); err != nil {
		t.Fatal(err)
	}
	if objs.reads != 3 || len(objs.tokens) != 1 {
		t.Fatalf("%d reads and %d tokens, want one for each of env, gone and s, and one token", objs.reads, len(objs.tokens))
	}
}

// All of a pod's files come in one exchange, however many there are.
func TestStagingIsOneExchange(t *testing.T) {
	k := newKnocTest(t)
	k.cluster.Stub("tar", "#!/bin/sh\necho x >>~/tars\nPATH=${PATH#*:} exec tar \"$@\"\n")
	k.start()
	objs := &fakeObjects{configMaps: map[string]*v1.ConfigMap{}}
	pod := k.pod("many", "true")
	pod.Namespace = "ns"
	for i := range 10 {
		name := fmt.Sprintf("cm%d", i)
		cm := &v1.ConfigMap{Data: map[string]string{}}
		for j := range 100 {
			cm.Data[fmt.Sprintf("key%d", j)] = fmt.Sprintf("value %d\n", i*j)
		}
		objs.configMaps[name] = cm
		pod.Spec.Volumes = append(pod.Spec.Volumes, v1.Volume{Name: name, VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: name}}}})
		pod.Spec.Containers[0].VolumeMounts = append(pod.Spec.Containers[0].VolumeMounts, v1.VolumeMount{Name: name, MountPath: "/" + name})
	}
	k.p.objs = objs
	k.api.create(pod)
	k.wait(pod.UID, "Succeeded", inPhase(v1.PodSucceeded))
	if got := k.cluster.Sh("wc -l <tars; cd .knoc/knoc-c1/uid-many/vol; find . -path '*/..[0-9a-f]*/*' -type f -perm 0644 | wc -l; cat cm7/key9"); got != "1\n1000\nvalue 63\n" {
		t.Errorf("exchanges, files and one of them: %q", got)
	}
	if objs.reads != 10 {
		t.Errorf("%d reads of objects, want 10", objs.reads)
	}
}

// What the cluster says of a full disk is told, and the pod starts when there is
// room.
func TestFullDisk(t *testing.T) {
	k := newKnocTest(t)
	k.cluster.Stub("tar", `#!/bin/sh
[ ! -e ~/full ] || { head -c 2000 >/dev/null; mkdir -p half; echo 'tar: vol/x: Cannot write: No space left on device' >&2; cat >/dev/null; exit 2; }
PATH=${PATH#*:} exec tar "$@"
`)
	k.cluster.Sh("touch full")
	k.start()
	pod := k.api.create(k.pod("full", "true"))
	const text = "the login node could not write the pod's files: tar: vol/x: Cannot write: No space left on device"
	k.awaitEvent("full FailedMount: " + text)
	k.waitingWith(pod, text)
	k.cluster.Sh("rm full")
	k.wait(pod.UID, "Succeeded", inPhase(v1.PodSucceeded))
	n := 0
	for _, e := range k.eventsAbout("full") {
		if strings.Contains(e, "FailedMount") {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d events, want 1", n)
	}
}
