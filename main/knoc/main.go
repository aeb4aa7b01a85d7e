// Command knoc is a Kubernetes node whose pods are jobs of a Slurm cluster.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/CARV-ICS-FORTH/knoc"
	"k8s.io/klog/v2"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr); err != nil {
		// One line, whatever a library put into its error.
		fmt.Fprintln(os.Stderr, "knoc:", strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' }), " "))
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, env func(string) string, stdout, stderr io.Writer) error {
	o, err := parse(args, env)
	switch {
	case errors.Is(err, flag.ErrHelp):
		usage(stdout)
		return nil
	case err != nil:
		return err
	case o.version:
		fmt.Fprintln(stdout, "knoc", version())
		return nil
	}
	handler := slog.Handler(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: o.logLevel}))
	if o.logFormat == "json" {
		handler = slog.NewJSONHandler(stderr, &slog.HandlerOptions{Level: o.logLevel})
	}
	o.config.Logger = slog.New(handler)
	klog.SetSlogLogger(o.config.Logger) // client-go logs through klog, which is the process's
	o.config.Version = version()
	return knoc.Run(ctx, o.config)
}

// version is the module's, as the go command recorded it; -ldflags may set another.
func version() string {
	if buildVersion != "" {
		return buildVersion
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

var buildVersion string
