package knoc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"
)

// kubeletTLS says who may call the kubelet port: who shows a client certificate
// of the given CA, and nobody else. That should be the CA of the API server's
// kubelet client (kube-apiserver --kubelet-client-certificate), since whoever
// gets in may run commands in every pod of this node.
//
// It is nil when no file is given: then the port stays closed, and kubectl logs
// and exec do not work, but nothing is ever open to the network.
func kubeletTLS(cfg Config) (*tls.Config, error) {
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
	cert, err := tls.LoadX509KeyPair(cfg.TLSCert, cfg.TLSKey)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert %s, --tls-key %s: %w", cfg.TLSCert, cfg.TLSKey, err)
	}
	pem, err := os.ReadFile(cfg.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("--client-ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--client-ca %s: no certificate in it", cfg.ClientCA)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{cert},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    pool,
	}, nil
}

// serveKubelet answers the kubelet port until ctx ends.
func serveKubelet(ctx context.Context, l net.Listener, h http.Handler, logger *slog.Logger) error {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 30 * time.Second, // no timeout for bodies: exec and logs -f last for hours
		IdleTimeout:       90 * time.Second, // as the kubelet's, between requests
		BaseContext:       func(net.Listener) context.Context { return ctx },
		// Port scanners and load balancers fail handshakes all day long.
		ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelDebug),
	}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("kubelet port %s: %w", l.Addr(), err)
	}
	return nil
}
