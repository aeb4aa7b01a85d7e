package knoc

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What quote writes, a real shell reads as the same bytes.
func TestQuote(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	for b := 1; b < 256; b++ {
		all.WriteByte(byte(b))
	}
	texts := append(slices.Clone(hostileTexts), all.String())
	var script strings.Builder
	script.WriteString("printf '%s\\0'")
	for _, text := range texts {
		script.WriteString(" " + string(quote(text)))
	}
	for _, shell := range testShells(t) {
		out, err := exec.Command(shell[0], append(slices.Clone(shell[1:]), "-c", script.String())...).Output()
		if err != nil {
			t.Fatalf("%s: %v", shell[0], err)
		}
		if diff := cmp.Diff(texts, strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")); diff != "" {
			t.Errorf("%s read something else (-want +got):\n%s", shell[0], diff)
		}
	}
}

// A field that the data lacks must not become an empty string in a script.
func TestRenderMissing(t *testing.T) {
	t.Parallel()
	if _, err := render("enter.sh.tmpl", map[string]string{}); err == nil {
		t.Fatal("a template was rendered without its data")
	}
}
