//go:build testbed

package e2e

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// mounts has a container of a pod mount volumes of the pod.
func mounts(c string, list ...v1.VolumeMount) func(*v1.Pod) {
	return func(p *v1.Pod) {
		for _, all := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
			for i := range all {
				if all[i].Name == c {
					all[i].VolumeMounts = append(all[i].VolumeMounts, list...)
				}
			}
		}
	}
}

// source is a volume that nobody mounts yet.
func source(name string, s v1.VolumeSource) func(*v1.Pod) {
	return func(p *v1.Pod) { p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: name, VolumeSource: s}) }
}

func configMapSource(name string) v1.VolumeSource {
	return v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: name}}}
}

// Parts of volumes: what is there, what is made, and what an expression names;
// also with users of the pod's own.
func TestSubPath(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	n.configMap("app", map[string]string{"app.conf": "conf"}, nil)
	const script = `
		echo "$(cat /etc/app.conf) $(cat /data/file) $(cat /work/it)"
		! env | grep KNOC && echo new >/work/new && echo more >>/data/file && ! echo x 2>/dev/null >/etc/app.conf && ls -d /data/nested/deep; until [ -e /data/go ]; do sleep 0.2; done`
	parts := []func(*v1.Pod){
		initContainer("prepare", "cd /all && mkdir -p a/real && echo text >a/file && echo it >a/real/it && ln -s real a/link"),
		source("app", configMapSource("app")), source("work", v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}),
		mounts("prepare", v1.VolumeMount{Name: "work", MountPath: "/all"}),
		mounts("main",
			v1.VolumeMount{Name: "app", MountPath: "/etc/app.conf", SubPath: "app.conf"},
			v1.VolumeMount{Name: "work", MountPath: "/data", SubPath: "new/dir"},
			v1.VolumeMount{Name: "work", MountPath: "/data/file", SubPath: "a/file"},
			v1.VolumeMount{Name: "work", MountPath: "/data/nested/deep"},
			v1.VolumeMount{Name: "work", MountPath: "/work", SubPathExpr: "$(DIR)/link"}),
		func(p *v1.Pod) {
			p.Spec.Containers[0].Env = []v1.EnvVar{{Name: "DIR", Value: "a"}, {Name: "a.b", Value: "c"}}
		},
		appContainer("other", "cd /all; until [ -e new/dir/go ]; do sleep 0.2; done; cat a/real/new a/file && ls -ld new/dir"),
		mounts("other", v1.VolumeMount{Name: "work", MountPath: "/all"}),
	}
	for name, p := range map[string]*pod{"plain": n.createOne(n.shell("plain", script, parts...)), "users": n.createOne(n.shell("users", script, append(parts, users)...))} {
		p.await("main to run", running("main"))
		p.awaitLog("conf text it", "-c", "main")
		// A shell would not pass such a name on.
		if out, err := tryKubectl(nil, "exec", "-n", n.name, p.name, "-c", "main", "--", "env"); err != nil || !strings.Contains(out, "\na.b=c\n") {
			t.Errorf("%s: env: %v %q", name, err, out)
		}
		if out, err := tryKubectl(nil, "exec", "-n", n.name, p.name, "-c", "main", "--", "sh", "-c", "cat /data/file; touch /data/go"); err != nil || !strings.HasPrefix(out, "text\n") {
			t.Errorf("%s: exec: %v %q", name, err, out)
		}
		p.awaitPhase(v1.PodSucceeded)
		if log := p.log("-c", "other"); !strings.HasPrefix(log, "new\ntext\nmore\n") {
			t.Errorf("%s: the other container sees %q", name, log)
		}
	}
}

// A container plants links in a volume that another one mounts parts of, and goes
// on to swap them while that one starts again and again.
func TestSubPathCannotLeaveItsVolume(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	work := source("work", v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}})
	all := v1.VolumeMount{Name: "work", MountPath: "/all"}
	victim := func(path string) v1.VolumeMount { return v1.VolumeMount{Name: "work", MountPath: "/v", SubPath: path} }
	pods := map[string]*pod{}
	for name, link := range map[string]string{"absolute": "/etc", "up": "../../../../../../../../../../etc", "pods": "../..", "passwd": "/etc/passwd"} {
		pods[name] = n.createOne(n.shell(name, "ls /v; cat /v", work, initContainer("plant", "ln -s "+link+" /all/chain && ln -s chain /all/link"), mounts("plant", all), mounts("main", victim("link"))))
	}
	swapped := n.createOne(n.shell("swapped", "cat /v/* | head -n 1; [ -e /v/mine ] || exit 9", work, restart(v1.RestartPolicyNever),
		mounts("main", victim("d")),
		func(p *v1.Pod) {
			for _, name := range []string{"b", "c", "d", "e", "f"} {
				appContainer(name, "cat /v/* | head -n 1; [ -e /v/mine ] || exit 9")(p)
				mounts(name, victim("d"))(p)
			}
			p.Spec.InitContainers = []v1.Container{container("first", "mkdir /all/real && echo mine >/all/real/mine && ln -s real /all/d"), container("plant", "cd /all; end=$(($(date +%s) + 8)); while [ $(date +%s) -lt $end ]; do ln -sfn real d; ln -sfn /etc d; done; rm d; ln -s real d; sleep 3600")}
			always := v1.ContainerRestartPolicyAlways
			p.Spec.InitContainers[1].RestartPolicy = &always
		}, mounts("first", all), mounts("plant", all)))
	for name, p := range pods {
		p.awaitPhase(v1.PodFailed)
		s := status(p.now(), "main").State.Terminated
		const want = `failed to prepare subPath for volumeMount "work" of container "main"`
		if s == nil || s.ExitCode != 128 || s.Reason != "CreateContainerConfigError" || s.Message != want {
			t.Errorf("%s: %+v", name, s)
		}
		if log := p.log("-c", "main"); log != "" {
			t.Errorf("%s: the container ran: %q", name, log)
		}
		p.awaitEvent("Warning Failed spec.containers{main}: Error: " + want)
	}
	swapped.await("an end", func(p *v1.Pod) bool { return p.Status.Phase == v1.PodFailed || p.Status.Phase == v1.PodSucceeded })
	for _, c := range swapped.now().Status.ContainerStatuses {
		log := swapped.log("-c", c.Name)
		if s := c.State.Terminated; s == nil || s.ExitCode == 9 || log != "" && log != "mine\n" {
			t.Errorf("swapped %s: %+v, log %q", c.Name, s, log)
		}
	}
}

// Directories of the compute nodes: by hostPath, by claims, by NFS.
func TestHostVolumes(t *testing.T) {
	t.Parallel()
	base := "/home/hpcuser/e2e-volumes"
	login(t, "rm -rf "+base+"; mkdir -p "+base+"/allowed/sub "+base+"/pv/data "+base+"/secret; echo text >"+base+"/allowed/sub/file; echo pv >"+base+"/pv/data/file; ln -s ../secret "+base+"/allowed/out; ln -s ~/.ssh "+base+"/allowed/keys")
	t.Cleanup(func() { login(t, "rm -rf "+base) })
	startKnoc(t, "knoc-volumes", "--host-path", base+"/allowed", "--volume-path", "/mnt/e2e="+base+"/pv,nas:/export="+base+"/pv")
	n := newNamespaceOn(t, "knoc-volumes")
	host := func(path string, typ v1.HostPathType) func(*v1.Pod) {
		return volume("host", "/host", v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: path, Type: &typ}})
	}
	claim := func(name string) func(*v1.Pod) {
		return volume("claim", "/claim", v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name}})
	}
	good := map[*pod]string{
		n.createOne(n.shell("host", "cat /host/file; echo new >>/host/new && cat /host/new", host(base+"/allowed/sub", v1.HostPathDirectory))):                                                                           "text\nnew\n",
		n.createOne(n.shell("file", "cat /host", host(base+"/allowed/sub/file", v1.HostPathFile))):                                                                                                                       "text\n",
		n.createOne(n.shell("create", "echo made >/host/f && cat /host/f", host(base+"/allowed/a/b", v1.HostPathDirectoryOrCreate))):                                                                                     "made\n",
		n.createOne(n.shell("users", "id -u; cat /host/file", host(base+"/allowed/sub", v1.HostPathDirectory), func(p *v1.Pod) { root := int64(0); p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: &root} })): "0\ntext\n",
		n.createOne(n.shell("nfs", "cat /nfs/file; echo x 2>/dev/null >/nfs/file || echo ro", volume("nfs", "/nfs", v1.VolumeSource{NFS: &v1.NFSVolumeSource{Server: "nas", Path: "/export/data", ReadOnly: true}}))):    "pv\nro\n",
	}
	for name, want := range map[string]string{
		base + "/secret":        `is not below a directory that knoc's --host-path allows`,
		base + "/allowed/out":   `leads out of what knoc's --host-path and --volume-path allow`,
		base + "/allowed/keys":  `leads out of what`,
		base + "/allowed/sub/x": `hostPath type check failed: ` + base + `/allowed/sub/x is not a directory`,
	} {
		p := n.createOne(n.shell("bad"+strings.ReplaceAll(strings.TrimPrefix(name, base), "/", "-"), "ls /host", host(name, v1.HostPathDirectory)))
		defer func() {
			if s := p.awaitPhase(v1.PodFailed).Status; !strings.Contains(s.Message, want) {
				t.Errorf("%s: %s %q, want %q", name, s.Reason, s.Message, want)
			}
		}()
	}

	waiting := n.createOne(n.shell("claim", "cat /claim/file", claim("claim"), bound))
	waiting.awaitEvent("Warning FailedMount : Unable to attach or mount volumes: unmounted volumes=[claim], unattached volumes=[], failed to process volumes=[claim]: error processing PVC " + n.name + "/claim: failed to fetch PVC from API server: persistentvolumeclaims \"claim\" not found")
	none, class := v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Mi")}, ""
	pv := n.name
	n.object(&v1.PersistentVolumeClaim{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolumeClaim"}, ObjectMeta: metav1.ObjectMeta{Name: "claim", Namespace: n.name},
		Spec: v1.PersistentVolumeClaimSpec{AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteMany}, StorageClassName: &class, VolumeName: pv, Resources: v1.VolumeResourceRequirements{Requests: none}}})
	n.object(&v1.PersistentVolume{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolume"}, ObjectMeta: metav1.ObjectMeta{Name: pv},
		Spec: v1.PersistentVolumeSpec{AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteMany}, Capacity: none, ClaimRef: &v1.ObjectReference{Namespace: n.name, Name: "claim"},
			PersistentVolumeSource: v1.PersistentVolumeSource{HostPath: &v1.HostPathVolumeSource{Path: "/mnt/e2e/data"}}}})
	t.Cleanup(func() { kubectl(t, "delete", "persistentvolume", pv, "--wait=false") })
	waiting.awaitPhase(v1.PodSucceeded)
	if log := waiting.log(); log != "pv\n" {
		t.Errorf("claim: log %q", log)
	}
	for p, want := range good {
		p.awaitPhase(v1.PodSucceeded)
		if log := p.log(); log != want {
			t.Errorf("%s: log %q, want %q", p.name, log, want)
		}
	}
	// A node identity may read what its own pods claim, by name.
	for what, want := range map[string]string{"persistentvolumeclaims/claim -n " + n.name: "yes", "persistentvolumes/" + pv + " -A": "yes", "persistentvolumeclaims/other -n " + n.name: "no"} {
		if out, _ := tryKubectl(nil, append(strings.Fields("auth can-i get "+what), "--as", "system:node:knoc-volumes", "--as-group", "system:nodes")...); !strings.HasPrefix(out, want) {
			t.Errorf("may a node identity get %s: %q, want %s", what, out, want)
		}
	}
}

// emptyDirs in the node's memory and on its scratch go with the pod; one that
// becomes too large takes the pod with it.
func TestEmptyDirs(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	limit := resource.MustParse("1Mi")
	kinds := []func(*v1.Pod){
		volume("mem", "/mem", v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory}}),
		emptyDir("tmp", "/tmp/x"),
		func(p *v1.Pod) { p.Annotations["slurm-job.knoc.io/scratch-volumes"] = "tmp" },
	}
	const script = "grep -E ' (/mem|/tmp/x) ' /proc/self/mountinfo; echo x >/mem/x && echo x >/tmp/x/y && mkdir -m 0 /mem/none && sleep 6"
	large := n.createOne(n.shell("large", "head -c 3000000 /dev/zero >/data/x; sleep 600", volume("data", "/data", v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{SizeLimit: &limit}})))
	for name, p := range map[string]*pod{"plain": n.createOne(n.shell("plain", script, kinds...)), "users": n.createOne(n.shell("users", "id; "+script, append(kinds, users)...))} {
		p.await("a run", func(o *v1.Pod) bool { return running("main")(o) || ended(o) })
		job, node := p.awaitJob(), p.now().Status.HostIP
		p.awaitPhase(v1.PodSucceeded)
		node = map[string]string{"10.77.0.11": "n1", "10.77.0.12": "n2"}[node]
		log := p.log()
		if !strings.Contains(log, "/knoc-20077/"+job+".") || !strings.Contains(log, " - tmpfs ") || name == "plain" && strings.Contains(log, "/.knoc/") {
			t.Errorf("%s: mounts %s", name, log)
		}
		if left := onNode(t, node, "ls -d /tmp/knoc-*/"+job+".* /dev/shm/knoc-*/"+job+".* 2>/dev/null; true"); left != "" {
			t.Errorf("%s: left on %s: %s", name, node, left)
		}
	}
	const want = `Usage of EmptyDir volume "data" exceeds the limit "1Mi". `
	if s := large.awaitPhase(v1.PodFailed).Status; s.Reason != "Evicted" || s.Message != want {
		t.Errorf("the large one: %s %q", s.Reason, s.Message)
	}
	large.awaitEvent("Warning Evicted : " + strings.TrimSpace(want))
}

// Every file of every kind of volume arrives byte for byte, with its mode, and is
// nobody else's; nothing of it is left when the pod is gone.
func TestProjections(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	nasty := "it's \"$(id)\" `x` \\ \n\t é\n\n"
	bytes := make([]byte, 300000)
	for i := range bytes {
		bytes[i] = byte(i * 7 >> 3)
	}
	data, keys := map[string]string{"nasty": nasty, "empty": "", "a.b-c_d": "x"}, map[string][]byte{"bin": bytes[:100000], "zero": {0}}
	n.configMap("cm", data, keys)
	n.secret("s", map[string][]byte{"user": []byte("u"), "key": bytes})
	yes := true
	n.object(&v1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{Name: "fixed"}, Data: map[string]string{"k": "v"}, Immutable: &yes})
	m := func(mode int32) *int32 { return &mode }
	named := func(name string) v1.LocalObjectReference { return v1.LocalObjectReference{Name: name} }
	p := n.createOne(n.shell("pod", `cd /v && find . -path '*/..data/*' -prune -o -type f -print | grep -v /token | sort | while read f; do echo "$(stat -c %a "$f") $(sha256sum <"$f" | cut -c1-64) $(echo "$f" | sed 's,/\.\.[0-9a-f]\{16\}/,/,')"; done; for d in *; do ls -ld $d/..data | grep -q -- '->' || echo no link in $d; done; echo x 2>/dev/null >/v/cm/new && echo writable; echo end; sleep 5`,
		volume("cm", "/v/cm", v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: named("cm")}}),
		volume("items", "/v/items", v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: named("cm"), DefaultMode: m(0o440), Items: []v1.KeyToPath{{Key: "nasty", Path: "deep/er/nasty"}, {Key: "bin", Path: "deep/bin", Mode: m(0o755)}}}}),
		volume("secret", "/v/secret", v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "s", DefaultMode: m(0o400)}}),
		volume("fixed", "/v/fixed", configMapSource("fixed")),
		volume("optional", "/v/optional", v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "gone", Optional: &yes}}),
		volume("down", "/v/down", v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Items: []v1.DownwardAPIVolumeFile{{Path: "name", Mode: m(0o600), FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.name"}}}}}),
		volume("all", "/v/all", v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{DefaultMode: m(0o600), Sources: []v1.VolumeProjection{
			{ConfigMap: &v1.ConfigMapProjection{LocalObjectReference: named("cm"), Items: []v1.KeyToPath{{Key: "empty", Path: "x/empty"}}}},
			{Secret: &v1.SecretProjection{LocalObjectReference: named("s"), Items: []v1.KeyToPath{{Key: "user", Path: "x/user", Mode: m(0o640)}}}},
			{DownwardAPI: &v1.DownwardAPIProjection{Items: []v1.DownwardAPIVolumeFile{{Path: "ns", FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.namespace"}}}}},
			{ServiceAccountToken: &v1.ServiceAccountTokenProjection{Path: "token", Audience: "me"}},
		}}})))
	var want []string
	file := func(mode, name string, body []byte) {
		want = append(want, fmt.Sprintf("%s %x ./%s", mode, sha256.Sum256(body), name))
	}
	file("600", "all/ns", []byte(n.name))
	file("600", "all/x/empty", nil)
	file("640", "all/x/user", []byte("u"))
	for _, name := range []string{"a.b-c_d", "bin", "empty", "nasty", "zero"} {
		file("644", "cm/"+name, append([]byte(data[name]), keys[name]...))
	}
	file("600", "down/name", []byte("pod"))
	file("644", "fixed/k", []byte("v"))
	file("755", "items/deep/bin", keys["bin"])
	file("440", "items/deep/er/nasty", []byte(nasty))
	file("400", "secret/key", bytes)
	file("400", "secret/user", []byte("u"))
	p.awaitLog("end\n")
	got := strings.Split(strings.TrimSuffix(strings.TrimSpace(p.log()), "\nend"), "\n")
	slices.SortFunc(got, func(a, b string) int {
		return strings.Compare(a[strings.LastIndex(a, " "):], b[strings.LastIndex(b, " "):])
	})
	slices.SortFunc(want, func(a, b string) int {
		return strings.Compare(a[strings.LastIndex(a, " "):], b[strings.LastIndex(b, " "):])
	})
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w {
		t.Errorf("got\n%s\nwant\n%s", g, w)
	}
	if open := login(t, "find "+p.dir()+"/vol -type d -printf '%m\\n' | sort -u; stat -c %a "+p.dir()); open != "700\n700" {
		t.Errorf("directories of modes %q, want 700 only", open)
	}
	dir := login(t, "cd "+p.dir()+" && pwd")
	kubectl(t, "-n", n.name, "delete", "pod", "pod", "--wait=true")
	until(t, "the pod's directory to be removed", func() bool { return login(t, "ls -d "+dir+" 2>/dev/null; true") == "" })
}
