//go:build testbed

package e2e

import (
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What env, envFrom, command and args say, and what the container has then, byte
// for byte: all rows are in one container.
func TestEnvTable(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	big := strings.Repeat("0123456789 $(id)\n", 100<<10/17)
	all := ""
	for c := rune(1); c < 128; c++ {
		all += string(c)
	}
	n.configMap("cm", map[string]string{"A": "from cm", "app.properties": "a=b\nc=$(id)\n", "x-y": "dash", "3d": "three", "big": big[:1000]}, map[string][]byte{"BINARY": {1, 2}})
	n.secret("s", map[string][]byte{"PASSWORD": []byte("p'\"$(A)\\"), "tls.crt": []byte("-----BEGIN\nx\n"), "ALL": []byte(all), "EMPTY": {}})
	n.object(&v1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: metav1.ObjectMeta{Name: "my-db"}, Spec: v1.ServiceSpec{Ports: []v1.ServicePort{{Name: "sql", Port: 5432}}}})
	ip := strings.TrimSpace(kubectl(t, "-n", n.name, "get", "service", "my-db", "-o", "jsonpath={.spec.clusterIP}"))

	value := func(name, v string) v1.EnvVar { return v1.EnvVar{Name: name, Value: v} }
	field := func(name, path string) v1.EnvVar {
		return v1.EnvVar{Name: name, ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: path}}}
	}
	yes := true
	secret := func(name, key string, optional *bool) v1.EnvVar {
		return v1.EnvVar{Name: name, ValueFrom: &v1.EnvVarSource{SecretKeyRef: &v1.SecretKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: "s"}, Key: key, Optional: optional}}}
	}
	key := func(name, key string) v1.EnvVar {
		return v1.EnvVar{Name: name, ValueFrom: &v1.EnvVarSource{ConfigMapKeyRef: &v1.ConfigMapKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}, Key: key}}}
	}
	const absent = "\x00"
	rows := []struct {
		env  v1.EnvVar
		want string
	}{
		{value("PLAIN", "x"), "x"},
		{value("EMPTY", ""), ""},
		{value("JSON", `{"a": ["b\\n", "c,d"], "e": "\"f\" 'g'"}`), `{"a": ["b\\n", "c,d"], "e": "\"f\" 'g'"}`},
		{value("BLANKS", "  x \t "), "  x \t "},
		{value("NEWLINES", "\n\na\r\nb\n\n"), "\n\na\r\nb\n\n"},
		{value("TABS", "\t\ta\tb"), "\t\ta\tb"},
		{value("COMMAND", "$(id -u) `id` ${HOME} $HOME $$"), "$(id -u) `id` ${HOME} $HOME $"},
		{value("BACKSLASHES", `\ \\ \n \t \0 \x41 \$(id)`), `\ \\ \n \t \0 \x41 \$(id)`},
		{value("QUOTES", `' " '' "" ' "`), `' " '' "" ' "`},
		{value("SHELL", "; & | > < * ? [a] {b,c} ~ # ! % ^ ( ) =, :"), "; & | > < * ? [a] {b,c} ~ # ! % ^ ( ) =, :"},
		{value("UTF8", "né 日本 🐟 \u00a0"), "né 日本 🐟 \u00a0"},
		{value("CONTROL", "\x01\x02\x07\x1b[31m\x7f"), "\x01\x02\x07\x1b[31m\x7f"},
		{value("PERCENT", "%s %d %%"), "%s %d %%"},
		{value("BIG", big), big},
		{secret("ALL", "ALL", nil), all},
		{value("REF", "1$(PLAIN)2"), "1x2"},
		{value("REF_LATER", "$(LATER)"), "$(LATER)"},
		{value("LATER", "l"), "l"},
		{value("REF_ESCAPED", "$$(PLAIN) $$$(PLAIN)"), "$(PLAIN) $x"},
		{value("REF_ONCE", "$(REF_ESCAPED)"), "$(PLAIN) $x"},
		{value("REF_NONE", "$(NOBODY) $() $( $(PLAIN"), "$(NOBODY) $() $( $(PLAIN"},
		{value("REF_FROM", "$(P_A)/$(P_app.properties)"), "from cm/a=b\nc=$(id)\n"},
		{value("REF_SERVICE", "$(MY_DB_SERVICE_HOST):$(MY_DB_SERVICE_PORT_SQL)"), ip + ":5432"},
		{secret("SECRET", "PASSWORD", nil), "p'\"$(A)\\"},
		{secret("SECRET_EMPTY", "EMPTY", nil), ""},
		{value("REF_SECRET", "u:$(SECRET)@h"), "u:p'\"$(A)\\@h"},
		{secret("OPTIONAL", "no", &yes), absent},
		{key("KEY", "A"), "from cm"},
		{field("NAME", "metadata.name"), "table"},
		{field("NAMESPACE", "metadata.namespace"), n.name},
		{field("LABEL", "metadata.labels['app.x/y']"), "l-1"},
		{field("ANNOTATION", "metadata.annotations['note']"), "näh \"q\"\n2"},
		{field("NODE", "spec.nodeName"), n.node},
		{field("ACCOUNT", "spec.serviceAccountName"), "default"},
		{value("PATH_LIKE", "/a:/b"), "/a:/b"},
		{value("PATH", "/bin:/usr/bin:$(PLAIN)"), "/bin:/usr/bin:x"},
		{value("HOME", "/data/home"), "/data/home"},
		{value("LANG", "de_DE.UTF-8"), "de_DE.UTF-8"},
		{value("http_proxy", "http://p:1"), "http://p:1"},
		{value("PWD_", "x"), "x"},
		{value("LD_PRELOAD", ""), ""},
		{value("BASH_ENV", "/etc/passwd"), "/etc/passwd"},
		{value("ENV", "/etc/passwd"), "/etc/passwd"},
		{value("IFS", ":"), ":"},
		{value("UID", "77"), "77"},
		{value("PREPEND_PATH", "/none"), "/none"},
		{value("APPTAINERENV_X", "x"), "x"},
		{value("SLURM_JOB_ID", "none"), "none"},
		{value("dotted.name", "$(id)\n"), "$(id)\n"},
		{value("dashed-name", "$(dotted.name)"), "$(id)\n"},
		{value("1digit", ""), ""},
		{value("odd '\"`$(x)~ name", "v"), "v"},
		{secret("secret.name", "PASSWORD", nil), "p'\"$(A)\\"},
		{value("SAME", "1"), "13"},
		{value("SAME", "$(SAME)3"), "13"},
	}
	others := []struct{ name, want string }{ // through envFrom, and from services
		{"P_A", "from cm"},
		{"P_app.properties", "a=b\nc=$(id)\n"},
		{"P_x-y", "dash"},
		{"3d", "three"},
		{"tls.crt", "-----BEGIN\nx\n"},
		{"P_BINARY", absent},
		{"MY_DB_SERVICE_HOST", ip},
		{"MY_DB_PORT_5432_TCP", "tcp://" + ip + ":5432"},
		{"KUBERNETES_SERVICE_PORT", "443"},
		{"SLURM_JOB_NODELIST", absent},
	}
	args := []struct{ arg, want string }{
		{"", ""},
		{"a b  c", "a b  c"},
		{"$(PLAIN)", "x"},
		{"$$(PLAIN) $$$$", "$(PLAIN) $$"},
		{"$(NOBODY) $(id -u) `id` $HOME", "$(NOBODY) $(id -u) `id` $HOME"},
		{"$(SECRET)", "p'\"$(A)\\"},
		{"$(dotted.name)$(UID)$(HOME)", "$(id)\n77/data/home"},
		{"$(MY_DB_SERVICE_HOST)", ip},
		{"\"'\\\n\t é", "\"'\\\n\t é"},
		{"--containall", "--containall"},
		{"-n", "-n"},
	}
	p := n.shell("table", `for a; do printf 'arg %s\n' "$(printf %s "$a." | base64 | tr -d '\n')"; done
printf 'env %s\n' "$(base64 /proc/$$/environ | tr -d '\n')"; until [ -e /tmp/end ]; do sleep 0.2; done`)
	p.Labels = map[string]string{"app.x/y": "l-1"}
	p.Annotations["note"] = "näh \"q\"\n2"
	c := &p.Spec.Containers[0]
	c.Command = append(c.Command, "sh")
	for _, a := range args {
		c.Args = append(c.Args, a.arg)
	}
	c.EnvFrom = []v1.EnvFromSource{
		{Prefix: "P_", ConfigMapRef: &v1.ConfigMapEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}}},
		{ConfigMapRef: &v1.ConfigMapEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}}},
		{SecretRef: &v1.SecretEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "s"}}},
	}
	want := map[string]string{}
	for _, r := range rows {
		c.Env = append(c.Env, r.env)
		want[r.env.Name] = r.want
	}
	for _, o := range others {
		want[o.name] = o.want
	}
	// With users of its own.
	users := n.shell("users", `printf '%s\n' "$(id -u) $HOME ${https_proxy-none} ${TERM-none}" "$(tr '\0' '\n' </proc/$$/environ | grep -F a.b=)"; until [ -e /tmp/end ]; do sleep 0.2; done`)
	id := int64(1234)
	users.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: &id}
	users.Spec.Containers[0].Env = []v1.EnvVar{value("HOME", "/data"), value("a.b", "$(id)")}
	pods := n.create(p, users)
	pod, user := pods[0], pods[1]
	user.awaitLog("1234 /data none none\na.b=$(id)\n")
	if out := user.kubectl("exec", "users", "--", "/bin/sh", "-c", `tr '\0' '\n' </proc/$$/environ | grep -F a.b=; touch /tmp/end`); out != "a.b=$(id)\n" {
		t.Errorf("kubectl exec into a pod with users of its own: %q", out)
	}
	pod.awaitLog("env ")
	check := func(what, encoded string) {
		raw, err := base64.StdEncoding.DecodeString(encoded)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for _, entry := range strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00") {
			name, v, _ := strings.Cut(entry, "=")
			if _, twice := got[name]; twice {
				t.Errorf("%s: %q is there twice", what, name)
			}
			got[name] = v
		}
		for name, w := range want {
			v, ok := got[name]
			if w == absent && ok || w != absent && (!ok || v != w) {
				t.Errorf("%s: %q is %.200q (there: %v), want %.200q", what, name, v, ok, w)
			}
		}
		for name, v := range got {
			if _, ok := want[name]; !ok && (strings.HasPrefix(name, "SLURM") || strings.Contains(v, "/home/") && !strings.HasPrefix(name, "APPTAINER_") && !strings.HasPrefix(name, "SINGULARITY_")) {
				t.Errorf("%s: %q came from the host: %.200q", what, name, v)
			}
		}
	}
	var lines []string
	for _, line := range strings.Split(pod.log(), "\n") {
		if arg, ok := strings.CutPrefix(line, "arg "); ok {
			raw, err := base64.StdEncoding.DecodeString(arg)
			if err != nil {
				t.Fatal(err)
			}
			lines = append(lines, strings.TrimSuffix(string(raw), "."))
		}
		if encoded, ok := strings.CutPrefix(line, "env "); ok {
			check("the container", encoded)
		}
	}
	var texts []string
	for _, a := range args {
		texts = append(texts, a.want)
	}
	if !slices.Equal(lines, texts) {
		t.Errorf("arguments:\ngot  %q\nwant %q", lines, texts)
	}
	check("kubectl exec", strings.TrimSpace(pod.kubectl("exec", "table", "--", "/bin/sh", "-c", `base64 /proc/$$/environ | tr -d '\n'`)))
	pod.kubectl("exec", "table", "--", "touch", "/tmp/end")
	pod.awaitPhase("Succeeded")
}

// A pod that names what does not exist waits, says so as a kubelet, and starts
// soon after it exists; deleted meanwhile it goes at once.
func TestEnvWaits(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	from := func(name, key string) func(*v1.Pod) {
		return func(p *v1.Pod) {
			p.Spec.Containers[0].Env = append(p.Spec.Containers[0].Env, v1.EnvVar{Name: "X", ValueFrom: &v1.EnvVarSource{ConfigMapKeyRef: &v1.ConfigMapKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: name}, Key: key}}})
		}
	}
	n.configMap("cm", map[string]string{"a": "b"}, nil)
	pods := n.create(n.shell("object", `echo "X=$X"`, from("late", "k")), n.shell("key", `echo "X=$X"`, from("cm", "k")), n.shell("deleted", "true", from("late", "k")))
	for i, message := range []string{`configmap "late" not found`, fmt.Sprintf("couldn't find key k in ConfigMap %s/cm", n.name), `configmap "late" not found`} {
		now := pods[i].await(message, func(p *v1.Pod) bool {
			w := status(p, "main").State.Waiting
			return w != nil && w.Reason == "CreateContainerConfigError" && w.Message == message
		})
		if now.Status.Phase != v1.PodPending {
			t.Errorf("pod %s is %s", now.Name, now.Status.Phase)
		}
		until(t, "an event Failed with "+message, func() bool {
			out := kubectl(t, "-n", n.name, "get", "events", "--field-selector", "reason=Failed,involvedObject.name="+now.Name, "-o", "jsonpath={.items[*].message}")
			return strings.Contains(out, message)
		})
	}
	since := time.Now()
	pods[2].kubectl("delete", "pod", "deleted", "--wait=false")
	pods[2].awaitGone()
	if took := time.Since(since); took > 10*time.Second {
		t.Errorf("a pod that waits was deleted within %v", took)
	}
	since = time.Now()
	n.configMap("late", map[string]string{"k": "now"}, nil)
	pods[1].kubectl("patch", "configmap", "cm", "-p", `{"data": {"k": "now"}}`)
	for _, p := range pods[:2] {
		p.awaitPhase("Succeeded")
		if log := p.log(); log != "X=now\n" {
			t.Errorf("pod %s: %q", p.name, log)
		}
	}
	t.Logf("healed and run within %v", time.Since(since))
}
