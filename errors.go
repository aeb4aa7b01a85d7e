package knoc

import (
	"errors"
	"fmt"
)

// refusal is why a pod can never run here. The pod becomes Failed with this
// reason and message; nothing is staged and nothing is submitted for it.
type refusal struct{ Reason, Message string }

func (r *refusal) Error() string { return r.Reason + ": " + r.Message }

// refuse makes a refusal. The message is a sentence for the pod's author: what
// was asked for, with what value, and what to do instead.
func refuse(reason, format string, args ...any) error {
	return &refusal{reason, fmt.Sprintf(format, args...)}
}

// notYet is why a pod cannot start at this moment, though it may later: an
// object it names does not exist yet. The pod stays Pending, its containers
// wait with this reason, and the loop tries again.
type notYet struct{ Reason, Message string }

func (n *notYet) Error() string { return n.Reason + ": " + n.Message }

// waitFor makes a notYet.
func waitFor(reason, format string, args ...any) error {
	return &notYet{reason, fmt.Sprintf(format, args...)}
}

// errConnection marks an error of the SSH connection itself: whatever the
// exchange was to change may or may not have happened.
var errConnection = errors.New("ssh connection")

// errFenced says that another knoc has taken a higher epoch for this node: this
// one must stop and change nothing more (exit status 75 of an exchange).
var errFenced = errors.New("another knoc has taken over this node")
