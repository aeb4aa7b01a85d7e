package knoc

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

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
		{"$(VAR)", `"${APPTAINERENV_VAR-\$(VAR)}"`},
		{"x=$(VAR)'", `'x='"${APPTAINERENV_VAR-\$(VAR)}"''\'''`},
		{"$$(VAR) $VAR ${VAR} $(a b) $(id -u) $()", `'$(VAR) $VAR ${VAR} $(a b) $(id -u) $()'`},
		{"$(a.b)$(UID)$(HOME)", `"${KNOC_ENV_612e62-\$(a.b)}""${KNOC_ENV_554944-\$(UID)}""${APPTAINER_HOME-\$(HOME)}"`},
	}
	for _, tc := range tests {
		if got := argument(tc.text, "APPTAINERENV_"); string(got) != tc.want {
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
		got, err := envFile(vars, runtime, false)
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
		{Name: ""}, {Name: "A=B"}, {Name: "A\nB"}, {Name: "APPTAINER_SHELL"},
		{Name: "LD_PRELOAD", Value: []valuePart{{Text: "a\r\nb"}}},
		{Name: "NUL", Value: []valuePart{{Text: "a\x00b"}}},
		{Name: "VAR", Value: []valuePart{{Var: "x;id"}}},
	} {
		if got, err := envFile([]envVar{v}, "", false); err == nil {
			t.Errorf("the variable %+v became %q, want an error", v, got)
		}
	}
}

func TestRuntimeArgv(t *testing.T) {
	t.Parallel()
	gpu := v1.ResourceList{nvidiaGPU: resource.MustParse("1")}
	yes, no, user := true, false, int64(1234)
	node := func(p *v1.Pod) { p.Spec.HostNetwork = true } // no host name: the words of interest are few
	const head = `'/opt/apptainer' --silent "$action" --containall --no-eval --no-umask`
	const dev = ` ${session:+--mount type=bind,source="$scratch/c/dev",destination=/dev --mount type=bind,source="$session/dev",destination=/dev/.d}`
	const message = ` ${session:+--mount 'type=bind,source=/d/msg/c,destination=/dev/termination-log'}`
	const tail = `${overlay:+--overlay "$scratch/c"} ${tmpfs:+--writable-tmpfs} --workdir "$scratch/c" --pwd "${workdir:-/}"`
	tests := []struct {
		name string
		pod  func(*v1.Pod)
		c    v1.Container
		want string
	}{
		{"image's own program", node, v1.Container{Image: "app"}, head + ` ` + tail + ` "$sif" "$@"`},
		{"args replace CMD", node, v1.Container{Image: "app", Args: []string{"-c", "x"}}, head + ` ` + tail + ` "$sif" "$@"`},
		{"command replaces ENTRYPOINT", node, v1.Container{Image: "app", Command: []string{"sh"}, Args: []string{"-c"}, WorkingDir: "/it's"},
			strings.Replace(head, `"$action"`, "exec", 1) + ` ${overlay:+--overlay "$scratch/c"} ${tmpfs:+--writable-tmpfs} --workdir "$scratch/c" --pwd '/it'\''s' "$sif" "$@"`},
		{"devices, registry, mounts", node, v1.Container{
			Image: "r:5000/app", Command: []string{"x"}, Resources: v1.ResourceRequirements{Limits: gpu},
			VolumeMounts: []v1.VolumeMount{{Name: "v", MountPath: "/data", ReadOnly: true}}},
			strings.Replace(head, `"$action"`, "exec", 1) + ` --nv ` + tail + ` --mount 'type=bind,source=/d/vol/v,destination=/data,ro' "$sif" "$@"`},
		{"host name", nil, v1.Container{Image: "app"},
			head + ` --hostname 'web' ` + tail + ` --mount 'type=bind,source=/d/run/pod.hosts,destination=/etc/hosts' "$sif" "$@"`},
		{"termination message", node, v1.Container{Image: "app", TerminationMessagePath: "/var//say"},
			head + ` ` + tail + ` --mount 'type=bind,source=/d/msg/c,destination=/var/say' "$sif" "$@"`},
		{"own hosts file", nil, v1.Container{Image: "app", VolumeMounts: []v1.VolumeMount{{Name: "v", MountPath: "/etc/hosts"}}},
			head + ` --hostname 'web' ` + tail + ` --mount 'type=bind,source=/d/vol/v,destination=/etc/hosts' "$sif" "$@"`},
		{"read-only", node, v1.Container{Image: "app", SecurityContext: &v1.SecurityContext{ReadOnlyRootFilesystem: &yes}},
			head + ` --no-mount tmp,home --pwd "${workdir:-/}" "$sif" "$@"`},
		{"user", node, v1.Container{
			Image: "app", SecurityContext: &v1.SecurityContext{RunAsUser: &user, AllowPrivilegeEscalation: &yes},
			VolumeMounts: []v1.VolumeMount{{Name: "v", MountPath: "/it's"}}},
			`${holder:+nsenter -U -t "$holder" --} '/opt/apptainer' --silent "$action" --containall --no-eval --no-umask ${overlay:+--overlay "$scratch/c"} ${tmpfs:+--writable-tmpfs} ${holder:+--no-mount tmp} --pwd "${workdir:-/}"` +
				` ${holder:+${home---home /none:/} --security uid:1234 --security gid:0} --mount 'type=bind,source='"$scratch/.vol/"'v,destination=/it'\''s' "$sif" "$@"`},
		{"groups", func(p *v1.Pod) {
			node(p)
			p.Spec.SecurityContext = &v1.PodSecurityContext{FSGroup: &user, SupplementalGroups: []int64{7, 1234}}
		}, v1.Container{Image: "app", SecurityContext: &v1.SecurityContext{AllowPrivilegeEscalation: &no, Capabilities: &v1.Capabilities{Drop: []v1.Capability{"chown", "CAP_KILL"}}}},
			`${holder:+nsenter -U -t "$holder" --} ${holder:+setpriv --no-new-privs} '/opt/apptainer' --silent "$action" --containall --no-eval --no-umask ${overlay:+--overlay "$scratch/c"} ${tmpfs:+--writable-tmpfs} ${holder:+--no-mount tmp} --pwd "${workdir:-/}"` +
				` ${holder:+--security gid:0:1234:7 --add-caps all --drop-caps CAP_CHOWN,CAP_KILL} "$sif" "$@"`},
		{"root", func(p *v1.Pod) {
			node(p)
			p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: new(int64)}
		}, v1.Container{Image: "app", SecurityContext: &v1.SecurityContext{Capabilities: &v1.Capabilities{Drop: []v1.Capability{"ALL"}}}},
			`${holder:+nsenter -U -t "$holder" --} '/opt/apptainer' --silent "$action" --containall --no-eval --no-umask ${overlay:+--overlay "$scratch/c"} ${tmpfs:+--writable-tmpfs} ${holder:+--no-mount tmp} --pwd "${workdir:-/}" ${holder:+--drop-caps all} "$sif" "$@"`},
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

// What the API has in command and args, and the image in ENTRYPOINT and CMD.
func TestProgram(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		c    v1.Container
		want string
	}{
		{v1.Container{}, "the entry|it's|a cmd|"},
		{v1.Container{Args: []string{"$(ADDRESS)", "two words"}}, "the entry|it's|10.0.0.1|two words|"},
		{v1.Container{Command: []string{"c", "$x"}}, "c|$x|"},
		{v1.Container{Command: []string{"c"}, Args: []string{"'", ""}}, "c|'||"},
	} {
		set, eval := program(&tc.c, scriptConfig{Runtime: "apptainer"})
		script := "entrypoint=" + string(quote("'the entry' "+string(quote("it's")))) + " cmd=" + string(quote("'a cmd'")) + " APPTAINERENV_ADDRESS=10.0.0.1\nset --"
		for _, w := range set {
			script += " " + string(w)
		}
		if eval != "" {
			script += "\neval " + string(eval)
		}
		for _, shell := range testShells(t) {
			out, err := exec.Command(shell[0], append(slices.Clone(shell[1:]), "-c", script+"\nprintf '%s|' \"$@\"")...).CombinedOutput()
			if err != nil || string(out) != tc.want {
				t.Errorf("%s: %v, %v becomes %q, want %q: %v", shell[0], tc.c.Command, tc.c.Args, out, tc.want, err)
			}
		}
	}
}
