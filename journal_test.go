package knoc

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseJournal(t *testing.T) {
	text := "1796072922 claim 17\n" +
		"1796072922 host n1 10.77.0.11 fd00::11\n" +
		"1796072923 host n1\n" +
		"1796072923 start app 0\n" +
		"1796072924 exit app 0 255\n" +
		"1796072924 backoff app 0 10\n" +
		"1796072930 stopping 30\n" +
		"1796072931 ack 0000000001\n" +
		"1796072931 pull app\n" +
		"1796072931 pulled app 1200\n" +
		"1796072931 pullfailed app 255\n" +
		"1796072931 hook app 0 post 0\n" +
		"1796072931 started app 0\n" +
		"1796072931 ready app 0 1\n" +
		"1796072931 unhealthy app 0 liveness 3\n" +
		"1796072931 kill app 0 liveness 30\n" +
		"1796072931 oom app 0\n" +
		"1796072931 message app 0\n" +
		"1796072931 deadline\n" +
		"1796072931 timelimit\n" +
		"1796072931 noids subuid\n" +
		"1796072932 done 1\n"
	want := []event{
		{at(1796072922), "claim", []string{"17"}},
		{at(1796072922), "host", []string{"n1", "10.77.0.11", "fd00::11"}},
		{at(1796072923), "host", []string{"n1"}},
		{at(1796072923), "start", []string{"app", "0"}},
		{at(1796072924), "exit", []string{"app", "0", "255"}},
		{at(1796072924), "backoff", []string{"app", "0", "10"}},
		{at(1796072930), "stopping", []string{"30"}},
		{at(1796072931), "ack", []string{"0000000001"}},
		{at(1796072931), "pull", []string{"app"}},
		{at(1796072931), "pulled", []string{"app", "1200"}},
		{at(1796072931), "pullfailed", []string{"app", "255"}},
		{at(1796072931), "hook", []string{"app", "0", "post", "0"}},
		{at(1796072931), "started", []string{"app", "0"}},
		{at(1796072931), "ready", []string{"app", "0", "1"}},
		{at(1796072931), "unhealthy", []string{"app", "0", "liveness", "3"}},
		{at(1796072931), "kill", []string{"app", "0", "liveness", "30"}},
		{at(1796072931), "oom", []string{"app", "0"}},
		{at(1796072931), "message", []string{"app", "0"}},
		{at(1796072931), "deadline", []string{}},
		{at(1796072931), "timelimit", []string{}},
		{at(1796072931), "noids", []string{"subuid"}},
		{at(1796072932), "done", []string{"1"}},
	}
	if d := cmp.Diff(want, parseJournal([]byte(text))); d != "" {
		t.Fatal(d)
	}
	// A journal that ends anywhere gives its whole lines.
	for i := range text {
		if got := len(parseJournal([]byte(text[:i]))); got != strings.Count(text[:i], "\n") {
			t.Fatalf("%q gave %d events", text[:i], got)
		}
	}
}

func TestParseJournalGarbage(t *testing.T) {
	for _, line := range []string{
		"", " ", "x", "5", "5 ", "5 nothing", "5  start app 0", "start app 0", "0 done 0", "-5 done 0", "5.5 done 0", "99999999999999 done 0",
		"5 start app", "5 start  0", "5 start app x", "5 start app -1", "5 start app 1 2", "5 start app 4294967296", "5 start app 2147483648", "5 exit app 0 256", "5 exit app 0",
		"5 exit app 0 +1", "5 done 2", "5 done", "5 done 0 0", "5 claim", "5 host", "5 stopping x", "5 ack", "5 done 0\r", "\x00\x005 done 0",
		"5 start ../../x 0", "5 message a/b 0", "5 message . 0", "5 message A 0", "5 hook app 0 during 1", "5 unhealthy app 0 readyness 1", "5 ready app 0 2", "5 deadline 1", "5 pullfailed app", "5 pullfailed ../x 1", "5 oom app x",
	} {
		text := "5 start app 0\n" + line + "\n6 done 1\n"
		got := parseJournal([]byte(text))
		if len(got) != 2 || got[0].Word != "start" || got[1].Word != "done" {
			t.Errorf("%q gave %+v", line, got)
		}
	}
}

func FuzzParseJournal(f *testing.F) {
	f.Add([]byte("1796072922 claim 17\n1796072922 host n1 10.77.0.11\n1796072923 start app 0\n1796072924 exit app 0 3\n1796072924 done 1\n"))
	f.Add([]byte("1 host n1\n\n2 backoff app 0 10\n3 stopping 30\n4 ack 1\n5 do"))
	f.Fuzz(func(t *testing.T, data []byte) {
		events := parseJournal(data)
		var b strings.Builder
		for _, e := range events {
			if _, ok := journalArgs[e.Word]; !ok || e.Time.Unix() <= 0 {
				t.Fatalf("%+v of %q", e, data)
			}
			b.WriteString(strings.Join(slices.Concat([]string{"1", e.Word}, e.Args), " ") + "\n")
		}
		if again := parseJournal([]byte(b.String())); len(again) != len(events) {
			t.Fatalf("%d events of %q, %d when written again", len(events), data, len(again))
		}
	})
}

// No journal makes knoc read another file than one of msg/.
func TestJournalTexts(t *testing.T) {
	text := "1 message app 00\n1 hook app 1 post 7\n1 hook app 1 pre 0\n1 unhealthy app 2 readiness 1\n1 pullfailed app 255\n1 pulled app 3\n1 message app -1\n1 message ../a 1\n1 message a..b 1\n"
	var got []string
	for _, e := range parseJournal([]byte(text)) {
		if name := e.text(); name != "" {
			got = append(got, name)
		}
	}
	if d := cmp.Diff([]string{"app.0", "app.2.readiness", "app.pull"}, got); d != "" {
		t.Fatal(d)
	}
}
