package knoc

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// TestFieldTable keeps the README's table of fields equal to fieldRules, which
// are what happens; -update writes it.
func TestFieldTable(t *testing.T) {
	const begin, end = "<!-- fields: made by go test -run TestFieldTable -update . -->\n", "<!-- /fields -->"
	data, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	head, rest, found := strings.Cut(string(data), begin)
	_, tail, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("README.md lacks the lines %q and %q", begin, end)
	}
	want := head + begin + fieldTable() + end + tail
	if *update {
		if err := os.WriteFile("README.md", []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != string(data) {
		t.Error("README.md's table of fields is not that of fieldRules; run go test -run TestFieldTable -update .")
	}
}

// fieldTable has a row for all fields of one type that are treated alike.
func fieldTable() string {
	var b strings.Builder
	b.WriteString("| of | fields | here | |\n| --- | --- | --- | --- |\n")
	names := map[string]map[string]rule{}
	for kind, rules := range fieldRules {
		if kind != typeOf[v1.EphemeralContainerCommon]() { // Container's
			names[kind.Name()] = rules
		}
	}
	order := []string{"PodSpec", "Container", "PodSecurityContext", "SecurityContext", "Volume", "VolumeSource", "VolumeMount"}
	rank := func(s string) int {
		if i := slices.Index(order, s); i >= 0 {
			return i
		}
		return len(order)
	}
	types := slices.SortedFunc(maps.Keys(names), func(a, b string) int { return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a, b)) })
	for _, kind := range types {
		type row struct {
			how  treatment
			note string
		}
		fields := map[row][]string{}
		for _, name := range slices.Sorted(maps.Keys(names[kind])) {
			r := names[kind][name]
			if name != "" {
				fields[row{r.How, r.Note}] = append(fields[row{r.How, r.Note}], "`"+name+"`")
			}
		}
		rows := slices.SortedFunc(maps.Keys(fields), func(a, b row) int { return cmp.Or(cmp.Compare(a.how, b.how), cmp.Compare(a.note, b.note)) })
		for _, r := range rows {
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", kind, strings.Join(fields[r], ", "), []string{"honoured", "ignored", "refused"}[r.how], r.note)
		}
	}
	return b.String()
}
