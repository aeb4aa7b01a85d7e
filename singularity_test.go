package knoc

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestImageRef(t *testing.T) {
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
		got, plainHTTP, err := imageRef(tc.image, insecure)
		if err != nil || got != tc.want || plainHTTP != tc.plainHTTP {
			t.Errorf("imageRef(%q) = %q, %v, %v; want %q, %v", tc.image, got, plainHTTP, err, tc.want, tc.plainHTTP)
		}
	}
	for _, image := range []string{
		"", " ", "Busybox", "busy box", "busybox:", "busybox:a b", "busybox@sha256:12", "busybox;id", "busybox\n", "$(id)", "-v", "--nv",
		"docker://", "docker:///x", "docker-archive://x", "instance://x", "http://x/y.sif",
		"oras://", "oras://-x", "library://a b", "file:image.sif", "file://image.sif", "/apps/a b.sif", "/apps/\n.sif", "./image.sif", "a//b", "a/", "/",
	} {
		if got, _, err := imageRef(image, nil); err == nil {
			t.Errorf("imageRef(%q) = %q, want an error", image, got)
		}
	}
}

func TestMountSpec(t *testing.T) {
	t.Parallel()
	tests := []struct {
		source, target string
		readOnly       bool
		want           string
	}{
		{"/d/vol/a", "/data", false, "type=bind,source=/d/vol/a,destination=/data"},
		{"/d/vol/a", "/data", true, "type=bind,source=/d/vol/a,destination=/data,ro"},
		{"/d/vol/a", "/my data=x", false, "type=bind,source=/d/vol/a,destination=/my data=x"},
		{"/d/vol/a", `/a,b"c`, true, `type=bind,source=/d/vol/a,"destination=/a,b""c",ro`},
	}
	for _, tc := range tests {
		got, err := mountSpec(tc.source, tc.target, tc.readOnly)
		if err != nil || got != tc.want {
			t.Errorf("mountSpec(%q, %q, %v) = %q, %v; want %q", tc.source, tc.target, tc.readOnly, got, err, tc.want)
		}
	}
}

func TestArgument(t *testing.T) {
	t.Parallel()
	tests := []struct{ text, want string }{
		{"", `''`},
		{"a b", `'a b'`},
		{"$(VAR)", `"${P_VAR-\$(VAR)}"`},
		{"x=$(VAR)'", `'x='"${P_VAR-\$(VAR)}"''\'''`},
		{"$$(VAR) $VAR ${VAR} $(a.b) $(1) $()", `'$(VAR) $VAR ${VAR} $(a.b) $(1) $()'`},
	}
	for _, tc := range tests {
		if got := argument(tc.text, "P_"); string(got) != tc.want {
			t.Errorf("argument(%q) = %s, want %s", tc.text, got, tc.want)
		}
	}
}

func TestEnvFile(t *testing.T) {
	t.Parallel()
	vars := []envVar{
		{Name: "EMPTY"},
		{Name: "TEXT", Value: []valuePart{{Text: "it's\n$(id)", Secret: true}}},
		{Name: "URL", Value: []valuePart{{Text: "http://"}, {Var: varPodIP}, {Text: ":80"}}},
	}
	for runtime, prefix := range map[string]string{"": "APPTAINER", "/opt/bin/apptainer": "APPTAINER", "/opt/singularity-ce": "SINGULARITY"} {
		got, err := envFile(vars, runtime)
		if err != nil {
			t.Fatal(err)
		}
		want := strings.ReplaceAll(`# A container's environment, written by knoc. It may hold secrets.
export PENV_EMPTY=''
export PENV_TEXT='it'\''s
$(id)'
export PENV_URL='http://'"$KNOC_POD_IP"':80'
`, "PENV", prefix+"ENV")
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("runtime %q (-want +got):\n%s", runtime, diff)
		}
	}
	for _, v := range []envVar{
		{Name: "a.b"}, {Name: "1A"}, {Name: ""}, {Name: "A=B"}, {Name: "A;id"},
		{Name: "NUL", Value: []valuePart{{Text: "a\x00b"}}},
		{Name: "VAR", Value: []valuePart{{Var: "x;id"}}},
	} {
		if got, err := envFile([]envVar{v}, ""); err == nil {
			t.Errorf("the variable %+v became %q, want an error", v, got)
		}
	}
}

func TestRuntimeArgv(t *testing.T) {
	t.Parallel()
	gpu := v1.ResourceList{nvidiaGPU: resource.MustParse("1")}
	yes, no, user := true, false, int64(1234)
	node := func(p *v1.Pod) { p.Spec.HostNetwork = true } // no host name: the words of interest are few
	const head = `'/opt/apptainer' --quiet run --containall --no-eval --no-umask`
	const dev = ` ${session:+--mount type=bind,source="$scratch/c/dev",destination=/dev --mount type=bind,source="$session/dev",destination=/dev/.d}`
	const message = ` ${session:+--mount 'type=bind,source=/d/msg/c,destination=/dev/termination-log'}`
	const tail = `${overlay:+--overlay "$scratch/c"} ${tmpfs:+--writable-tmpfs} --workdir "$scratch/c" --pwd '/'`
	tests := []struct {
		name string
		pod  func(*v1.Pod)
		c    v1.Container
		want string
	}{
		{"image's own program", node, v1.Container{Image: "app"}, head + ` ` + tail + ` 'docker://app'`},
		{"args replace CMD", node, v1.Container{Image: "app", Args: []string{"-c", "x"}}, head + ` ` + tail + ` 'docker://app' '-c' 'x'`},
		{"command replaces ENTRYPOINT", node, v1.Container{Image: "app", Command: []string{"sh"}, Args: []string{"-c"}, WorkingDir: "/it's"},
			strings.Replace(head, "run", "exec", 1) + ` ${overlay:+--overlay "$scratch/c"} ${tmpfs:+--writable-tmpfs} --workdir "$scratch/c" --pwd '/it'\''s' 'docker://app' 'sh' '-c'`},
		{"devices, registry, mounts", node, v1.Container{
			Image: "r:5000/app", Command: []string{"x"}, Resources: v1.ResourceRequirements{Limits: gpu},
			VolumeMounts: []v1.VolumeMount{{Name: "v", MountPath: "/data", ReadOnly: true}}},
			strings.Replace(head, "run", "exec", 1) + ` --no-https --nv ` + tail + ` --mount 'type=bind,source=/d/vol/v,destination=/data,ro' 'docker://r:5000/app' 'x'`},
		{"host name", nil, v1.Container{Image: "app"},
			head + ` --hostname 'web' ` + tail + ` --mount 'type=bind,source=/d/run/pod.hosts,destination=/etc/hosts' 'docker://app'`},
		{"termination message", node, v1.Container{Image: "app", TerminationMessagePath: "/var//say"},
			head + ` ` + tail + ` --mount 'type=bind,source=/d/msg/c,destination=/var/say' 'docker://app'`},
		{"own hosts file", nil, v1.Container{Image: "app", VolumeMounts: []v1.VolumeMount{{Name: "v", MountPath: "/etc/hosts"}}},
			head + ` --hostname 'web' ` + tail + ` --mount 'type=bind,source=/d/vol/v,destination=/etc/hosts' 'docker://app'`},
		{"read-only", node, v1.Container{Image: "app", SecurityContext: &v1.SecurityContext{ReadOnlyRootFilesystem: &yes}},
			head + ` --no-mount tmp,home --pwd '/' 'docker://app'`},
		{"user", node, v1.Container{
			Image: "app", SecurityContext: &v1.SecurityContext{RunAsUser: &user, AllowPrivilegeEscalation: &yes},
			VolumeMounts: []v1.VolumeMount{{Name: "v", MountPath: "/it's"}}},
			`${holder:+nsenter -U -t "$holder" --} '/opt/apptainer' --silent run --containall --no-eval --no-umask ${overlay:+--overlay "$scratch/c"} ${tmpfs:+--writable-tmpfs} ${holder:+--no-mount tmp} --pwd '/'` +
				` ${holder:+--home /none:/ --security uid:1234 --security gid:0} --mount 'type=bind,source='"$scratch/.vol/"'v,destination=/it'\''s' 'docker://app'`},
		{"groups", func(p *v1.Pod) {
			node(p)
			p.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &user, SupplementalGroups: []int64{7, 1234}}
		}, v1.Container{Image: "app", SecurityContext: &v1.SecurityContext{AllowPrivilegeEscalation: &no, Capabilities: &v1.Capabilities{Drop: []v1.Capability{"chown", "CAP_KILL"}}}},
			`${holder:+nsenter -U -t "$holder" --} ${holder:+setpriv --no-new-privs} '/opt/apptainer' --silent run --containall --no-eval --no-umask ${overlay:+--overlay "$scratch/c"} ${tmpfs:+--writable-tmpfs} ${holder:+--no-mount tmp} --pwd '/'` +
				` ${holder:+--security gid:0:1234:7 --add-caps all --drop-caps CAP_CHOWN,CAP_KILL} 'docker://app'`},
		{"root", func(p *v1.Pod) {
			node(p)
			p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: new(int64)}
		}, v1.Container{Image: "app", SecurityContext: &v1.SecurityContext{Capabilities: &v1.Capabilities{Drop: []v1.Capability{"ALL"}}}},
			`${holder:+nsenter -U -t "$holder" --} '/opt/apptainer' --silent run --containall --no-eval --no-umask ${overlay:+--overlay "$scratch/c"} ${tmpfs:+--writable-tmpfs} ${holder:+--no-mount tmp} --pwd '/' ${holder:+--drop-caps all} 'docker://app'`},
	}
	for _, tc := range tests {
		pod := &v1.Pod{Spec: v1.PodSpec{Volumes: []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}}}}
		pod.Name = "web"
		if tc.pod != nil {
			tc.pod(pod)
		}
		tc.c.Name = "c"
		pod.Spec.Containers = []v1.Container{tc.c}
		lines, err := runtimeArgv(pod, &tc.c, scriptConfig{Dir: "/d", Runtime: "/opt/apptainer", InsecureRegistries: []string{"r:5000"}})
		if err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		var words []string
		for _, line := range lines {
			for _, w := range line {
				words = append(words, string(w))
			}
		}
		got := strings.Join(words, " ")
		if at := messagePath(&tc.c); at == v1.TerminationMessagePathDefault {
			if !strings.Contains(got, dev) || !strings.Contains(got, message) {
				t.Errorf("%s: nothing for %s in %s", tc.name, at, got)
			}
			got = strings.Replace(strings.Replace(got, dev, "", 1), message, "", 1)
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
	}
}
