package knoc

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseNodeConfig(t *testing.T) {
	for _, c := range []struct {
		name, file string
		want       KNOCConfig
	}{
		{"empty", ``, KNOCConfig{}},
		{"other node", `{"other": {"cpu": "4"}}`, KNOCConfig{}},
		{"the first KNoC's file", `{"knoc": {"cpu": "8", "memory": "16Gi", "pods": "30"}}`, KNOCConfig{"8", "16Gi", "30"}},
		{"named and silent", `{"knoc": {}}`, KNOCConfig{"20", "100Gi", "20"}},
		{"named and half silent", `{"knoc": {"memory": "1Ti"}}`, KNOCConfig{"20", "1Ti", "20"}},
		{"defaults", `{"*": {"cpu": "2"}}`, KNOCConfig{CPU: "2"}},
		{"defaults under a named node", `{"*": {"cpu": "2", "pods": "7"}, "knoc": {"pods": "9"}}`, KNOCConfig{"2", "100Gi", "9"}},
		{"yaml", "knoc:\n  cpu: 500m\n  pods: '5'\n", KNOCConfig{"500m", "100Gi", "5"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := parseNodeConfig([]byte(c.file), "knoc")
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, got.KNOCConfig); d != "" {
				t.Fatal(d)
			}
		})
	}
}

func TestParseNodeConfigRefuses(t *testing.T) {
	for _, c := range []struct{ file, want string }{
		{`{"knoc": {"cpus": "4"}}`, `node "knoc": unknown field "cpus"`},
		{`{"other": {"cpu": "lots"}}`, `node "other": cpu "lots"`},
		{`{"knoc": {"memory": "-1Gi"}}`, `node "knoc": memory "-1Gi"`},
		{`{"knoc": {"pods": "1500m"}}`, `node "knoc": pods "1500m"`},
		{`{"knoc": {"pods": 20}}`, `node "knoc": pods is a number where a string belongs`},
		{`{"knoc": "20"}`, `node "knoc": is a string where a map belongs`},
		{`["knoc"]`, `not a map of node names`},
		{`{"knoc": {}, "knoc": {}}`, `already`},
		{"knoc:\n\tcpu: 4", `neither JSON nor YAML`},
	} {
		_, err := parseNodeConfig([]byte(c.file), "knoc")
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %s", c.file, err, c.want)
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: the error has more than one line: %q", c.file, err)
		}
	}
}

func TestLoadNodeConfigNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "knoc.json")
	if _, err := loadNodeConfig(path, "knoc"); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatalf("a missing file: %v", err)
	}
	if err := os.WriteFile(path, []byte(`{"knoc": {"cpu": "x"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := loadNodeConfig(path, "knoc"); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatalf("a bad file: %v", err)
	}
}
