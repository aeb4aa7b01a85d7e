package knoc

import (
	"fmt"
	"strings"
	"time"
)

// A node's directory may be taken away while knoc runs: by hand, by a site's
// cleaning of scratch, with the file system. Then every exchange ends with 73.
// It is made again where that is safe (heal.sh). What was in it is lost: pods
// that were not submitted are staged anew; jobs run on without a journal, and
// Slurm's word alone says how they end.
const (
	healAfter = 5 * time.Second // it may be about to be moved back
	healEvery = 15 * time.Second
)

func (l *loop) directoryIsGone(exit *exitError) {
	text := fmt.Sprintf("the directory %s on the login node is gone or cannot be used%s", l.remote.dir, excerpt(": ", strings.ToValidUTF8(exit.Stderr, "?")))
	if l.dirTrouble == "" {
		l.dirSince = l.now()
	}
	if text != l.dirTrouble {
		l.dirTrouble = text
		l.setState()
	}
}

func (l *loop) directoryIsThere() {
	if l.dirTrouble != "" {
		l.dirTrouble = ""
		l.setState()
	}
}

func (l *loop) startHeal(now time.Time) {
	if l.dirTrouble == "" || l.healing {
		return
	}
	if at := later(l.dirSince.Add(healAfter), l.healAt); now.Before(at) {
		l.at(at)
		return
	}
	l.healing, l.healAt = true, now.Add(healEvery)
	l.async(time.Minute, l.remote.heal, func(err error) {
		l.healing = false
		if err != nil {
			l.log.Warn("the node's directory is gone, and it is not made again; what is wrong there needs somebody", "directory", l.remote.dir, "err", err)
			return
		}
		l.log.Warn("the node's directory was gone and is made again; the journals and logs in it are lost", "directory", l.remote.dir, "epoch", l.remote.currentEpoch())
	})
}
