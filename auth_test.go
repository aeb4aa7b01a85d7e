package knoc

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
)

// testCerts are files of a CA, a server certificate for 127.0.0.1 and a client's.
type testCerts struct {
	ca, cert, key string
	client        tls.Certificate
	pool          *x509.CertPool
}

func newTestCerts(t *testing.T) testCerts {
	t.Helper()
	dir := t.TempDir()
	var caCert *x509.Certificate
	var caKey *ecdsa.PrivateKey
	make := func(name string, isCA bool) (certPEM, keyPEM []byte) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		tmpl := &x509.Certificate{
			SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IsCA: isCA, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
			IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		}
		parent, signer := caCert, caKey
		if isCA {
			parent, signer = tmpl, key
		}
		der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, &key.PublicKey, signer)
		if err != nil {
			t.Fatal(err)
		}
		if isCA {
			caKey = key
			caCert, _ = x509.ParseCertificate(der)
		}
		keyDER, _ := x509.MarshalECPrivateKey(key)
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
			pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})
	}
	write := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	c := testCerts{pool: x509.NewCertPool()}
	ca, _ := make("ca", true)
	c.pool.AppendCertsFromPEM(ca)
	c.ca = write("ca.pem", ca)
	cert, key := make("server", false)
	c.cert, c.key = write("cert.pem", cert), write("key.pem", key)
	cert, key = make("client", false)
	var err error
	if c.client, err = tls.X509KeyPair(cert, key); err != nil {
		t.Fatal(err)
	}
	return c
}

// testRights is an API server that knows one token, and who may do what.
func testRights(t *testing.T) (*fake.Clientset, *atomic.Int32) {
	c := fake.NewClientset()
	var asked atomic.Int32
	c.PrependReactor("create", "tokenreviews", func(a k8stesting.Action) (bool, runtime.Object, error) {
		asked.Add(1)
		review := a.(k8stesting.CreateAction).GetObject().(*authenticationv1.TokenReview)
		switch review.Spec.Token {
		case "good":
			review.Status.Authenticated = true
			review.Status.User = authenticationv1.UserInfo{Username: "reader", Groups: []string{"readers"}}
		case "broken":
			return true, nil, errors.New("etcd is away")
		}
		return true, review, nil
	})
	c.PrependReactor("create", "subjectaccessreviews", func(a k8stesting.Action) (bool, runtime.Object, error) {
		asked.Add(1)
		review := a.(k8stesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview)
		s, r := review.Spec, review.Spec.ResourceAttributes
		if r.Resource != "nodes" || r.Name != "knoc" || r.Group != "" {
			t.Errorf("asked about %+v", r)
		}
		switch s.User {
		case "client":
			review.Status.Allowed = true
		case "reader":
			review.Status.Allowed = r.Verb == "get" && slices.Contains([]string{"stats", "metrics", "pods"}, r.Subresource)
		}
		return true, review, nil
	})
	return c, &asked
}

// testPort serves a kubelet port, whose node is knoc, and returns a GET of it.
func testPort(t *testing.T, files testCerts, api kubernetes.Interface) func(method, path, token string, certs ...tls.Certificate) string {
	cfg := Config{Listen: "127.0.0.1:0", TLSCert: files.cert, TLSKey: files.key, ClientCA: files.ca}.withDefaults()
	cfg.Logger = slog.New(slog.DiscardHandler)
	kf, err := newKubeletFiles(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, err := (&virtualNode{}).listen(cfg, kf, "")
	if err != nil {
		t.Fatal(err)
	}
	pods := &kubePods{lister: statusClientOf(fake.NewClientset(), &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "known"}}).lister}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	who := newCallers(kf, api, "knoc", cfg.Logger)
	go func() { done <- serveHTTP(ctx, l, who.only(kubeletHandler(newTestEngine(), pods)), cfg.Logger) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return func(method, path, token string, certs ...tls.Certificate) string {
		client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: files.pool, Certificates: certs}}, Timeout: 10 * time.Second}
		defer client.CloseIdleConnections()
		r, err := http.NewRequest(method, "https://"+l.Addr().String()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		answer, err := client.Do(r)
		if err != nil {
			return err.Error()
		}
		defer answer.Body.Close()
		body, _ := io.ReadAll(answer.Body)
		return answer.Status + " " + string(body)
	}
}

func TestKubeletPort(t *testing.T) {
	t.Parallel()
	files, strangers := newTestCerts(t), newTestCerts(t)
	api, _ := testRights(t)
	ask := testPort(t, files, api)
	for _, test := range []struct{ method, path, client, reader string }{
		{"GET", "/healthz", "200 OK ok", "403 "},
		{"GET", "/containerLogs/a/b/c", "200 OK a line of log\n", "403 Forbidden Forbidden (user=reader, verb=get, resource=nodes, subresource(s)=[proxy])"},
		{"GET", "/containerLogs/a/b/c?tailLines=0", "200 OK ", "403 "},
		{"GET", "/stats/summary", "200 OK ", "200 OK "},
		{"GET", "/stats/../containerLogs/a/b/c", "200 OK a line of log\n", "403 "},
		{"GET", "/metrics/resource", "200 OK ", "200 OK "},
		{"GET", "/pods", `"name":"known"`, `"name":"known"`},
		{"GET", "/runningpods/", "", "200 OK "},
		{"POST", "/stats/summary", "40", "403 "},
		{"POST", "/exec/a/b/c", "", "403 "},
		{"GET", "/exec/a/b/c", "", "403 "},
		{"POST", "/attach/a/b/c", "", "403 "},
		{"POST", "/portForward/a/b", "", "403 "},
		{"GET", "/nowhere", "404", "403 "},
		{"GET", "/", "404", "403 "},
	} {
		for who, got := range map[string]string{
			"nobody":                  ask(test.method, test.path, ""),
			"a stranger":              ask(test.method, test.path, "", strangers.client),
			"a token that is none":    ask(test.method, test.path, "bad"),
			"a stranger with a token": ask(test.method, test.path, "bad", strangers.client),
		} {
			if !strings.HasPrefix(got, "401 ") {
				t.Errorf("%s %s: %s got %q, want 401", test.method, test.path, who, got)
			}
		}
		if got := ask(test.method, test.path, "", files.client); !strings.Contains(got, test.client) || strings.HasPrefix(got, "401") || strings.HasPrefix(got, "403") {
			t.Errorf("%s %s: the client got %q, want %q", test.method, test.path, got, test.client)
		}
		if got := ask(test.method, test.path, "good"); !strings.Contains(got, test.reader) {
			t.Errorf("%s %s: the token's user got %q, want %q", test.method, test.path, got, test.reader)
		}
	}
	if got := ask("GET", "/pods", "broken"); !strings.HasPrefix(got, "500 ") || strings.Contains(got, "etcd") {
		t.Errorf("without an answer to the review: %q", got)
	}
}

// The API server is asked once in a while, not at each request.
func TestKubeletPortRemembers(t *testing.T) {
	t.Parallel()
	api, asked := testRights(t)
	who := newCallers(nil, api, "knoc", slog.New(slog.DiscardHandler))
	now := time.Now()
	who.tokens.now = func() time.Time { return now }
	who.allowed.now = who.tokens.now
	h := who.only(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	request := func(path, token string) int {
		r := httptest.NewRequest("GET", path, nil)
		r.Header.Set("Authorization", "bearer "+token)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Code
	}
	for _, step := range []struct {
		after       time.Duration
		path, token string
		code        int
		asked       int32
	}{
		{0, "/stats/summary", "good", 200, 2},
		{0, "/stats/summary", "good", 200, 0},
		{0, "/metrics/resource", "good", 200, 1},
		{0, "/exec/a/b/c", "good", 403, 1},
		{time.Second, "/exec/a/b/c", "good", 403, 0},
		{denyTTL, "/exec/a/b/c", "good", 403, 1},
		{tokenTTL, "/stats/summary", "good", 200, 1}, // the right is still known
		{allowTTL, "/stats/summary", "good", 200, 2},
		{0, "/stats/summary", "bad", 401, 1},
		{0, "/stats/summary", "bad", 401, 0},
		{noTokenTTL, "/stats/summary", "bad", 401, 1},
		{0, "/stats/summary", "broken", 500, 1},
		{0, "/stats/summary", "broken", 500, 1},
	} {
		now = now.Add(step.after)
		before := asked.Load()
		if code := request(step.path, step.token); code != step.code || asked.Load()-before != step.asked {
			t.Errorf("%s with token %s: code %d after %d questions, want %d after %d", step.path, step.token, code, asked.Load()-before, step.code, step.asked)
		}
	}
	for i := range 2 * mostRemembered {
		who.tokens.get(sha256.Sum256([]byte{byte(i), byte(i >> 8)}), func() (*authenticationv1.UserInfo, time.Duration, error) { return nil, time.Hour, nil })
	}
	if n := len(who.tokens.at); n > mostRemembered {
		t.Errorf("%d answers are remembered", n)
	}
}

// A new certificate is served without a restart; a broken one is not.
func TestKubeletPortNewFiles(t *testing.T) {
	t.Parallel()
	files, next := newTestCerts(t), newTestCerts(t)
	api, _ := testRights(t)
	ask := testPort(t, files, api)
	copyFile := func(from, to string) {
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := ask("GET", "/healthz", "", files.client); got != "200 OK ok" {
		t.Fatal(got)
	}
	copyFile(next.cert, files.cert) // the key is still the old one
	if got := ask("GET", "/healthz", "", files.client); got != "200 OK ok" {
		t.Fatalf("with half of a pair: %s", got)
	}
	copyFile(next.key, files.key)
	copyFile(next.ca, files.ca)
	if got := ask("GET", "/healthz", "", files.client); !strings.Contains(got, "unknown authority") {
		t.Fatalf("the old certificate is still served: %s", got)
	}
	old := files.client
	*files.pool = *next.pool
	if got := ask("GET", "/healthz", "", next.client); got != "200 OK ok" {
		t.Errorf("a client of the new CA got %q", got)
	}
	if got := ask("GET", "/healthz", "", old); !strings.HasPrefix(got, "401 ") {
		t.Errorf("a client of the old CA got %q", got)
	}
}

func TestKubeletPortOldTLS(t *testing.T) {
	t.Parallel()
	files := newTestCerts(t)
	f, err := newKubeletFiles(Config{TLSCert: files.cert, TLSKey: files.key, ClientCA: files.ca})
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", f.tlsConfig(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.(*tls.Conn).Handshake()
			c.Close()
		}
	}()
	for version, ok := range map[uint16]bool{tls.VersionTLS11: false, tls.VersionTLS12: true, tls.VersionTLS13: true} {
		c, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{RootCAs: files.pool, MinVersion: tls.VersionTLS10, MaxVersion: version})
		if (err == nil) != ok {
			t.Errorf("%s: %v", tls.VersionName(version), err)
		}
		if err == nil {
			c.Close()
		}
	}
}

func TestKubeletTLSIsAllOrNothing(t *testing.T) {
	f := newTestCerts(t)
	junk := filepath.Join(t.TempDir(), "junk")
	if err := os.WriteFile(junk, []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		cert, key, ca, want string
	}{
		{f.cert, f.key, "", "--client-ca is missing"},
		{"", f.key, f.ca, "--tls-cert is missing"},
		{f.cert, "", "", "--tls-key is missing"},
		{f.cert, f.ca, f.ca, "--tls-key"},
		{f.cert, f.key, junk, "no certificate in it"},
		{f.cert, f.key, junk + "x", "no such file"},
	} {
		if _, err := newKubeletFiles(Config{TLSCert: c.cert, TLSKey: c.key, ClientCA: c.ca}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %s", err, c.want)
		}
	}
	if c, err := newKubeletFiles(Config{}); c != nil || err != nil {
		t.Errorf("nothing given: %v %v", c, err)
	}
}
