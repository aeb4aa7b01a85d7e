//go:build testbed

package e2e

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// A secret's text is in files that only its owner reads, and nowhere else: not
// in a script (Slurm keeps a copy and shows it), not in a command line (anybody
// on the machine can read these), not in the log.
func TestSecretsAreInFilesOfTheirOwnerOnly(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	const text = "hunter2-correct-horse"
	n.secret("secret", map[string][]byte{"key": []byte(text)})

	var stop, found atomic.Bool
	watched := make(chan struct{})
	go func() { // all machines of the testbed are below this one's process table
		defer close(watched)
		for !stop.Load() {
			lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
			for _, f := range lines {
				if line, _ := os.ReadFile(f); bytes.Contains(line, []byte(text)) {
					found.Store(true)
				}
			}
			time.Sleep(50 * time.Millisecond)
		}
	}()
	p := n.createOne(n.shell("pod", "cat /secret/key; printf %s \"$SECRET\"; sleep 5", func(p *v1.Pod) {
		p.Spec.Containers[0].Env = []v1.EnvVar{{Name: "SECRET", ValueFrom: &v1.EnvVarSource{SecretKeyRef: &v1.SecretKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: "secret"}, Key: "key"}}}}
	}, volume("secret", "/secret", v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "secret"}})))
	p.awaitLog(text + text)
	id := p.awaitJob()
	if out := login(t, fmt.Sprintf("scontrol show job -dd %[1]s; scontrol write batch_script %[1]s -; cd %s && cat pod.sh meta journal.* slurm.out", id, p.dir())); strings.Contains(out, text) || !strings.Contains(out, "#SBATCH") {
		t.Errorf("the secret is in the script or in what Slurm shows:\n%s", out)
	}
	if open := login(t, fmt.Sprintf("find %s ! -type l ! -path '*/run/pod.hosts' ! -path '*/vol/*/*/*' -perm /077 | head; stat -c %%a ~/.knoc ~/.knoc/*/ | sort -u", p.dir())); open != "700" {
		t.Errorf("others may read (want only 700): %s", open)
	}
	p.awaitPhase("Succeeded")
	stop.Store(true)
	<-watched
	if found.Load() {
		t.Error("the secret was in a command line")
	}
	log, err := os.ReadFile(env("KNOC_LOG"))
	if err != nil || bytes.Contains(log, []byte(text)) {
		t.Errorf("the secret is in knoc's log (%v)", err)
	}
}

func TestKubeletPortIsClosedWithoutAClientCertificate(t *testing.T) {
	t.Parallel()
	node := kubectl(t, "get", "node", env("KNOC_NODE"), "-o", `jsonpath={.status.addresses[?(@.type=="InternalIP")].address}:{.status.daemonEndpoints.kubeletEndpoint.Port}`)
	ca, err := os.ReadFile(env("KNOC_PKI") + "/ca.crt")
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	get := func(certificates ...tls.Certificate) (string, error) {
		c := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certificates}}}
		r, err := c.Get("https://" + node + "/pods")
		if err != nil {
			return "", err
		}
		r.Body.Close()
		return r.Status, nil
	}
	load := func(cert, key string) tls.Certificate {
		c, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if status, err := get(); err == nil && !strings.HasPrefix(status, "401") {
		t.Errorf("without a certificate: %s", status)
	}
	dir := t.TempDir()
	if out, err := execute(nil, "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/O=system:masters/CN=kubernetes-admin",
		"-keyout", dir+"/key", "-out", dir+"/crt"); err != nil {
		t.Fatal(err, out)
	}
	if status, err := get(load(dir+"/crt", dir+"/key")); err == nil && !strings.HasPrefix(status, "401") {
		t.Errorf("with a certificate of nobody's: %s", status)
	}
	pki := env("KNOC_PKI")
	if status, err := get(load(pki+"/kubelet-client.crt", pki+"/kubelet-client.key")); err != nil || !strings.HasPrefix(status, "200") {
		t.Errorf("as the API server: %s %v", status, err)
	}
}
