package knoc

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// kubeletFiles are the kubelet port's certificate and the CA of its callers'
// certificates. They are read again when they change, as cert-manager and kubeadm
// replace them in place; a half-written pair leaves the one before in use.
type kubeletFiles struct {
	cert, key, ca string

	mu     sync.Mutex
	stamp  string // of the three files
	config *tls.Config
	roots  *x509.CertPool
}

// newKubeletFiles reads the files. It is nil when no file is given: then the
// port stays closed, and kubectl logs and exec do not work, but nothing is ever
// open to the network.
func newKubeletFiles(cfg Config) (*kubeletFiles, error) {
	if cfg.TLSCert == "" && cfg.TLSKey == "" && cfg.ClientCA == "" {
		return nil, nil
	}
	for _, f := range []struct{ flag, value string }{
		{"--tls-cert", cfg.TLSCert}, {"--tls-key", cfg.TLSKey}, {"--client-ca", cfg.ClientCA},
	} {
		if f.value == "" {
			return nil, fmt.Errorf("%s is missing: the kubelet port needs --tls-cert, --tls-key and --client-ca, or none of them to stay closed", f.flag)
		}
	}
	f := &kubeletFiles{cert: cfg.TLSCert, key: cfg.TLSKey, ca: cfg.ClientCA}
	return f, f.load()
}

// load reads the files if one of them has changed.
func (f *kubeletFiles) load() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var stamp string
	for _, name := range []string{f.cert, f.key, f.ca} {
		if s, err := os.Stat(name); err == nil { // what is missing is said below
			stamp += fmt.Sprint(s.ModTime().UnixNano(), " ", s.Size(), " ")
		}
	}
	if stamp == f.stamp && f.config != nil {
		return nil
	}
	cert, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return fmt.Errorf("--tls-cert %s, --tls-key %s: %w", f.cert, f.key, err)
	}
	pem, err := os.ReadFile(f.ca)
	if err != nil {
		return fmt.Errorf("--client-ca: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return fmt.Errorf("--client-ca %s: no certificate in it", f.ca)
	}
	f.stamp, f.roots = stamp, roots
	f.config = &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{cert},
		// Who comes with none may have a token, and a wrong one is answered with
		// 401 as a kubelet does, not with a handshake that fails.
		ClientAuth: tls.RequestClientCert,
		ClientCAs:  roots,
		NextProtos: []string{"http/1.1"}, // exec and port-forward upgrade the connection
	}
	return nil
}

// tlsConfig is for the listener.
func (f *kubeletFiles) tlsConfig(logger *slog.Logger) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			if err := f.load(); err != nil {
				logger.Error("the kubelet port keeps the certificates it has", "error", err)
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.config, nil
		},
	}
}

// callers says who may call the kubelet port, as a kubelet does with
// --authentication-token-webhook and --authorization-mode=Webhook: a caller has a
// client certificate of the CA or a bearer token (TokenReview), and the right to
// the node's subresource that the path belongs to (SubjectAccessReview). There
// are no anonymous callers.
type callers struct {
	files  *kubeletFiles
	api    kubernetes.Interface
	node   string
	logger *slog.Logger

	tokens  *answers[*authenticationv1.UserInfo]
	allowed *answers[bool]
}

// How long the API server's answers hold: the kubelet's own defaults
// (authentication.webhook.cacheTTL, authorization.webhook.cacheAuthorizedTTL and
// cacheUnauthorizedTTL). A token that is none may be one soon.
const (
	tokenTTL   = 2 * time.Minute
	noTokenTTL = 10 * time.Second
	allowTTL   = 5 * time.Minute
	denyTTL    = 30 * time.Second
)

func newCallers(files *kubeletFiles, api kubernetes.Interface, node string, logger *slog.Logger) *callers {
	return &callers{files: files, api: api, node: node, logger: logger,
		tokens: newAnswers[*authenticationv1.UserInfo](), allowed: newAnswers[bool]()}
}

// only lets the callers through to h who may do what they ask for.
func (c *callers) only(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, err := c.identify(r)
		switch {
		case err != nil:
			c.logger.Error("a caller of the kubelet port cannot be identified", "error", err)
			http.Error(w, "Internal Server Error", http.StatusInternalServerError)
			return
		case user == nil:
			http.Error(w, "Unauthorized", http.StatusUnauthorized)
			return
		}
		verb, subresources := kubeletAttributes(r)
		for _, sub := range subresources {
			ok, err := c.may(r.Context(), user, verb, sub)
			if err != nil {
				c.logger.Error("a caller's rights cannot be asked for", "user", user.Username, "error", err)
				http.Error(w, fmt.Sprintf("Authorization error (user=%s, verb=%s, resource=nodes, subresource=%s)", user.Username, verb, sub), http.StatusInternalServerError)
				return
			}
			if ok {
				h.ServeHTTP(w, r)
				return
			}
		}
		http.Error(w, fmt.Sprintf("Forbidden (user=%s, verb=%s, resource=nodes, subresource(s)=%s)", user.Username, verb, subresources), http.StatusForbidden)
	})
}

// identify is the caller; nil for nobody.
func (c *callers) identify(r *http.Request) (*authenticationv1.UserInfo, error) {
	if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		c.files.mu.Lock()
		roots := c.files.roots
		c.files.mu.Unlock()
		chain := r.TLS.PeerCertificates
		options := x509.VerifyOptions{Roots: roots, Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
		for _, cert := range chain[1:] {
			options.Intermediates.AddCert(cert)
		}
		if _, err := chain[0].Verify(options); err == nil && chain[0].Subject.CommonName != "" {
			// The API server reads names from certificates in the same way.
			return &authenticationv1.UserInfo{
				Username: chain[0].Subject.CommonName,
				Groups:   append(slices.Clone(chain[0].Subject.Organization), "system:authenticated"),
			}, nil
		}
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "bearer") || token == "" {
		return nil, nil
	}
	key := sha256.Sum256([]byte(token))
	return c.tokens.get(key, func() (*authenticationv1.UserInfo, time.Duration, error) {
		review, err := c.api.AuthenticationV1().TokenReviews().Create(r.Context(),
			&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
		switch {
		case apierrors.IsInvalid(err) || err == nil && !review.Status.Authenticated:
			return nil, noTokenTTL, nil
		case err != nil:
			return nil, 0, fmt.Errorf("token review: %w", err)
		}
		return &review.Status.User, tokenTTL, nil
	})
}

// may asks whether the user has the verb on the node's subresource.
func (c *callers) may(ctx context.Context, user *authenticationv1.UserInfo, verb, sub string) (bool, error) {
	spec := authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups,
		ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: verb, Version: "v1", Resource: "nodes", Subresource: sub, Name: c.node},
	}
	if len(user.Extra) > 0 {
		spec.Extra = map[string]authorizationv1.ExtraValue{}
		for k, v := range user.Extra {
			spec.Extra[k] = authorizationv1.ExtraValue(v)
		}
	}
	text, err := spec.Marshal()
	if err != nil {
		return false, err
	}
	return c.allowed.get(sha256.Sum256(text), func() (bool, time.Duration, error) {
		review, err := c.api.AuthorizationV1().SubjectAccessReviews().Create(ctx,
			&authorizationv1.SubjectAccessReview{Spec: spec}, metav1.CreateOptions{})
		if err != nil {
			return false, 0, fmt.Errorf("subject access review: %w", err)
		}
		if review.Status.Allowed && !review.Status.Denied {
			return true, allowTTL, nil
		}
		return false, denyTTL, nil
	})
}

// kubeletAttributes are the verb of a request and the subresources of the node of
// which one must be allowed, the finer one first (NodeRequestAttributesGetter in
// pkg/kubelet/server/auth.go).
func kubeletAttributes(r *http.Request) (verb string, subresources []string) {
	switch r.Method {
	case http.MethodPost:
		verb = "create"
	case http.MethodPut:
		verb = "update"
	case http.MethodPatch:
		verb = "patch"
	case http.MethodDelete:
		verb = "delete"
	default:
		verb = "get"
	}
	clean := path.Clean(r.URL.Path) // as it will be served
	for _, p := range []struct {
		path string
		subs []string
	}{
		{"/stats", []string{"stats"}},
		{"/metrics", []string{"metrics"}},
		{"/logs", []string{"log"}},
		{"/pods", []string{"pods", "proxy"}},
		{"/runningpods", []string{"pods", "proxy"}},
		{"/healthz", []string{"healthz", "proxy"}},
		{"/configz", []string{"configz", "proxy"}},
	} {
		if clean == p.path || strings.HasPrefix(clean, p.path+"/") {
			return verb, p.subs
		}
	}
	return verb, []string{"proxy"}
}

// answers remembers answers for a time. Callers that nobody knows must not fill
// the memory, so it has a bound.
type answers[T any] struct {
	now func() time.Time
	mu  sync.Mutex
	at  map[[sha256.Size]byte]remembered[T]
}

type remembered[T any] struct {
	answer T
	until  time.Time
}

const mostRemembered = 4096

func newAnswers[T any]() *answers[T] {
	return &answers[T]{now: time.Now, at: map[[sha256.Size]byte]remembered[T]{}}
}

// get asks again when the answer is too old; an error is not remembered.
func (c *answers[T]) get(key [sha256.Size]byte, ask func() (T, time.Duration, error)) (T, error) {
	c.mu.Lock()
	known, ok := c.at[key]
	c.mu.Unlock()
	if ok && c.now().Before(known.until) {
		return known.answer, nil
	}
	answer, hold, err := ask()
	if err != nil {
		return answer, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.at) >= mostRemembered {
		clear(c.at)
	}
	c.at[key] = remembered[T]{answer, c.now().Add(hold)}
	return answer, nil
}

// serveHTTP answers a port until ctx ends.
func serveHTTP(ctx context.Context, l net.Listener, h http.Handler, logger *slog.Logger) error {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 30 * time.Second, // no timeout for bodies: exec and logs -f last for hours
		IdleTimeout:       90 * time.Second, // as the kubelet's, between requests
		MaxHeaderBytes:    64 << 10,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		// Port scanners and load balancers fail handshakes all day long.
		ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelDebug),
	}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("%s: %w", l.Addr(), err)
	}
	return nil
}
