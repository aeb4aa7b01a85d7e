//go:build testbed

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Changed objects reach running pods within 90 s, those with users of their own
// too; whoever reads meanwhile sees one version or the other; a subPath keeps what
// it had.
func TestRefresh(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	n.configMap("cm", map[string]string{"a": "1", "b": "1", "gone": "1", "sub": "1"}, nil)
	n.secret("s", map[string][]byte{"key": []byte("old")})
	change := func(p *v1.Pod) {
		p.Labels = map[string]string{"color": "red"}
		volume("cm", "/cm", v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}}})(p)
		volume("s", "/s", v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "s"}})(p)
		volume("d", "/d", v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Items: []v1.DownwardAPIVolumeFile{{Path: "labels", FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.labels"}}}}})(p)
		c := &p.Spec.Containers[0]
		c.VolumeMounts = append(c.VolumeMounts, v1.VolumeMount{Name: "cm", MountPath: "/sub", SubPath: "sub"})
	}
	// Both keys of one version, through one directory.
	const script = `echo "sub $(cat /sub)"; until [ -e /tmp/end ]; do
	if cd "/cm/$(readlink /cm/..data)" 2>/dev/null; then
		a=$(cat a 2>/dev/null) b=$(cat b 2>/dev/null)
		[ -z "$a" ] || [ -z "$b" ] || [ "$a" = "$b" ] || echo "half: $a $b"
	fi
	[ -e /cm/a ] || echo "no a"
	now="$(cat /cm/a) $(cat /s/key) $(cat /d/labels) $(cat /sub)"
	[ "$now" = "$last" ] || echo "now $now"
	last=$now
	sleep 0.1
done; ls -A /cm | tr '\n' ' '`
	user := int64(1234)
	pods := n.create(n.shell("plain", script, change), n.shell("users", script, change, func(p *v1.Pod) {
		p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: &user, FSGroup: &user}
	}))
	for _, p := range pods {
		p.awaitLog(`now 1 old color="red" 1`)
	}
	since := time.Now()
	kubectl(t, "-n", n.name, "patch", "configmap", "cm", "--type=merge", "-p", `{"data": {"a": "2", "b": "2", "sub": "2", "gone": null, "new": "2"}}`)
	kubectl(t, "-n", n.name, "patch", "secret", "s", "--type=merge", "-p", `{"stringData": {"key": "fresh"}}`)
	for _, p := range pods {
		p.kubectl("label", "pod", p.name, "--overwrite", "color=blue")
	}
	for _, p := range pods {
		p.awaitLog(`now 2 fresh color="blue" 1`)
	}
	if took := time.Since(since); took > 90*time.Second {
		t.Errorf("changes took %v", took)
	} else {
		t.Logf("changes took %v", took)
	}
	for _, p := range pods {
		p.kubectl("exec", p.name, "--", "touch", "/tmp/end")
		p.awaitPhase("Succeeded")
		log := p.log()
		if strings.Contains(log, "half:") || strings.Contains(log, "no a") {
			t.Errorf("pod %s saw half of a version:\n%s", p.name, log)
		}
		names := strings.Fields(log[strings.LastIndexByte(strings.TrimSpace(log), '\n')+1:])
		if len(names) < 6 || strings.Contains(fmt.Sprint(names), "gone") {
			t.Errorf("pod %s: the volume has %v", p.name, names)
		}
	}
}
