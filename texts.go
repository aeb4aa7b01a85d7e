package knoc

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// What containers, probes, hooks and pulls have to say is in files of msg/; the
// journal only says that it is there. A text is read before the journal's word
// of it is handed on, since a pod's last status is never corrected.
const (
	// textPatience is how long a text may be missing that the journal refers to:
	// a shared home may show one before the other.
	textPatience = 2 * time.Second
	// textsKept is how many texts of a pod are of interest: of the newest runs.
	textsKept = 100
	// textsAtOnce bounds what is read of all pods when knoc starts.
	textsAtOnce = 1000
)

// textName is a file in a pod's msg/.
type textName struct {
	uid  types.UID
	file string
}

// wantedTexts are the files that events refer to, each once, the newest ones.
func wantedTexts(events []event) []string {
	var files []string
	for _, e := range slices.Backward(events) {
		if file := e.text(); file != "" && !slices.Contains(files, file) {
			if files = append(files, file); len(files) == textsKept {
				break
			}
		}
	}
	return files
}

// readTexts reads texts; those that are not there it leaves out.
func readTexts(ctx context.Context, a asker, names []textName) (map[textName]string, error) {
	if len(names) == 0 {
		return nil, nil
	}
	requests := make([]string, len(names))
	for i, n := range names {
		requests[i] = fmt.Sprintf("text %s %s %d", n.uid, n.file, textLimit)
	}
	texts := map[textName]string{}
	err := a.ask(ctx, requests, func(name string, body []byte) error {
		if word := strings.SplitN(name, ".", 3); len(word) == 3 && word[0] == "text" {
			texts[textName{types.UID(word[1]), word[2]}] = shortened(string(body), textLimit)
		}
		return nil
	})
	return texts, err
}

// eventsIn are the events of a piece of a journal, with the line whose
// beginning was read before.
func (p *KNOCProvider) eventsIn(uid types.UID, at position, piece []byte) []event {
	p.mu.RLock()
	defer p.mu.RUnlock()
	var line []byte
	if w := p.works[uid]; w != nil && w.restart == at.restart && at.offset <= int64(len(w.journal)) {
		line = w.journal[:at.offset]
		line = line[bytes.LastIndexByte(line, '\n')+1:]
	}
	return parseJournal(slices.Concat(line, piece))
}

// textsIn are the files that a piece of a journal refers to, and those that change
// without a word in it.
func (p *KNOCProvider) textsIn(uid types.UID, at position, piece []byte) []string {
	files := wantedTexts(p.eventsIn(uid, at, piece))
	p.mu.RLock()
	defer p.mu.RUnlock()
	if w := p.works[uid]; w != nil {
		for _, file := range w.turns {
			if !slices.Contains(files, file) {
				files = append(files, file)
			}
		}
	}
	return files
}

// adoptTexts reads the texts of pods whose directories a starting knoc found. It
// does without rather than not start.
func (l *loop) adoptTexts(all []found) map[types.UID]map[string]string {
	var names []textName
	for _, f := range all {
		for _, file := range wantedTexts(parseJournal(f.Journal)) {
			if len(names) < textsAtOnce {
				names = append(names, textName{f.Meta.UID, file})
			}
		}
	}
	if len(names) == 0 {
		return nil
	}
	a, err := l.remote.watch(l.ctx, time.Second) // once, nothing is held
	var texts map[textName]string
	if err == nil {
		texts, err = readTexts(l.ctx, a, names)
	}
	if err != nil {
		l.log.Warn("reading what containers left in msg/; their messages may be missing", "err", err)
	}
	byPod := map[types.UID]map[string]string{}
	for n, text := range texts {
		if byPod[n.uid] == nil {
			byPod[n.uid] = map[string]string{}
		}
		byPod[n.uid][n.file] = text
	}
	return byPod
}

// takeTexts keeps texts, and forgets those of runs long ago.
func (w *work) takeTexts(texts map[string]string) {
	if len(texts) == 0 {
		return
	}
	kept := make(map[string]string, len(w.texts)+len(texts))
	if len(w.texts)+len(texts) <= 2*textsKept {
		for file, text := range w.texts {
			kept[file] = text
		}
	} else {
		for _, file := range wantedTexts(w.events) {
			kept[file] = w.texts[file]
		}
	}
	for file, text := range texts {
		kept[file] = text
	}
	w.texts, w.dirty = kept, true
}
