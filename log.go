package knoc

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/virtual-kubelet/virtual-kubelet/log"
)

// vkLogger lets virtual-kubelet log through slog. Its own adapter (log/slog in
// v1.14) panics where virtual-kubelet logs an error value instead of a string.
type vkLogger struct{ *slog.Logger }

var _ log.Logger = vkLogger{}

func (l vkLogger) at(level slog.Level, msg string) {
	// virtual-kubelet says this when it believes that it deletes a pod; knoc's
	// statusClient does not let it, and says so itself when the loop does.
	if msg == "Force deleting pod in running state" {
		level = slog.LevelDebug
	}
	l.Log(context.Background(), level, msg)
}

func (l vkLogger) Debug(a ...any)            { l.at(slog.LevelDebug, fmt.Sprint(a...)) }
func (l vkLogger) Debugf(f string, a ...any) { l.at(slog.LevelDebug, fmt.Sprintf(f, a...)) }
func (l vkLogger) Info(a ...any)             { l.at(slog.LevelInfo, fmt.Sprint(a...)) }
func (l vkLogger) Infof(f string, a ...any)  { l.at(slog.LevelInfo, fmt.Sprintf(f, a...)) }
func (l vkLogger) Warn(a ...any)             { l.at(slog.LevelWarn, fmt.Sprint(a...)) }
func (l vkLogger) Warnf(f string, a ...any)  { l.at(slog.LevelWarn, fmt.Sprintf(f, a...)) }
func (l vkLogger) Error(a ...any)            { l.at(slog.LevelError, fmt.Sprint(a...)) }
func (l vkLogger) Errorf(f string, a ...any) { l.at(slog.LevelError, fmt.Sprintf(f, a...)) }

// Fatal does not end the process: only main does.
func (l vkLogger) Fatal(a ...any)            { l.Error(a...) }
func (l vkLogger) Fatalf(f string, a ...any) { l.Errorf(f, a...) }

func (l vkLogger) WithField(k string, v any) log.Logger { return vkLogger{l.With(k, v)} }
func (l vkLogger) WithError(err error) log.Logger       { return vkLogger{l.With("error", err)} }
func (l vkLogger) WithFields(fields log.Fields) log.Logger {
	with := l.Logger
	for k, v := range fields {
		with = with.With(k, v)
	}
	return vkLogger{with}
}
