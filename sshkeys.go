package knoc

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
	"golang.org/x/crypto/ssh/knownhosts"
)

// keyring is what we show to the servers: a key file and the ssh-agent's keys.
type keyring struct {
	file    string
	signer  []ssh.Signer // of the file: its certificate first, then the key
	agentAt string       // SSH_AUTH_SOCK
}

// newKeyring reads the key file, if one is given. Without one there must be an
// agent.
func newKeyring(file, passphraseFile string) (*keyring, error) {
	k := &keyring{file: file, agentAt: os.Getenv("SSH_AUTH_SOCK")}
	if file == "" {
		if k.agentAt == "" {
			return nil, errors.New("no ssh key: name a key file, or start knoc with an ssh-agent (SSH_AUTH_SOCK)")
		}
		return k, nil
	}
	key, err := readKey(file, passphraseFile)
	if err != nil {
		return nil, err
	}
	if isPEM(file) {
		k.file, k.signer = "the key given as text", []ssh.Signer{key}
		return k, nil
	}
	if cert, err := readCertificate(file+"-cert.pub", key); err != nil {
		return nil, err
	} else if cert != nil {
		k.signer = append(k.signer, cert)
	}
	k.signer = append(k.signer, key)
	return k, nil
}

func (k *keyring) String() string {
	var s []string
	if k.file != "" {
		s = append(s, k.file)
	}
	if k.agentAt != "" {
		s = append(s, "the ssh-agent's")
	}
	return strings.Join(s, ", ")
}

// isPEM says whether the name of a key file is a key: the first KNoC's chart put
// the key's own text into REMOTE_KEY.
func isPEM(file string) bool { return strings.Contains(file, "PRIVATE KEY-----") }

// readKey reads a private key file, or takes the key that stands in place of its
// name. The errors never quote either.
func readKey(file, passphraseFile string) (ssh.Signer, error) {
	pem, err := []byte(file+"\n"), error(nil)
	if isPEM(file) {
		file = "in place of a file name"
	} else if pem, err = os.ReadFile(file); err != nil {
		return nil, fmt.Errorf("reading the ssh key: %w", err)
	}
	key, err := ssh.ParsePrivateKey(pem)
	var encrypted *ssh.PassphraseMissingError
	switch {
	case err == nil:
		return key, nil
	case !errors.As(err, &encrypted):
		return nil, fmt.Errorf("ssh key %s: %w; it must be a private key in OpenSSH or PEM form, as ssh-keygen writes it", file, err)
	case passphraseFile == "":
		return nil, fmt.Errorf("ssh key %s is encrypted: name a file that holds its passphrase, or load the key into an ssh-agent", file)
	}
	passphrase, err := os.ReadFile(passphraseFile)
	if err != nil {
		return nil, fmt.Errorf("reading the passphrase of ssh key %s: %w", file, err)
	}
	key, err = ssh.ParsePrivateKeyWithPassphrase(pem, []byte(strings.TrimRight(string(passphrase), "\r\n")))
	if errors.Is(err, x509.IncorrectPasswordError) {
		return nil, fmt.Errorf("ssh key %s: the passphrase in %s is wrong", file, passphraseFile)
	}
	if err != nil {
		return nil, fmt.Errorf("ssh key %s: %w", file, err)
	}
	return key, nil
}

// readCertificate reads the certificate of a key, if there is one.
func readCertificate(file string, key ssh.Signer) (ssh.Signer, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the ssh certificate: %w", err)
	}
	pub, _, _, _, err := ssh.ParseAuthorizedKey(text)
	if err != nil {
		return nil, fmt.Errorf("ssh certificate %s: %w", file, err)
	}
	cert, ok := pub.(*ssh.Certificate)
	if !ok {
		return nil, fmt.Errorf("ssh certificate %s: it is a %s key and no certificate", file, pub.Type())
	}
	signer, err := ssh.NewCertSigner(cert, key)
	if err != nil {
		return nil, fmt.Errorf("ssh certificate %s: %w", file, err)
	}
	return signer, nil
}

// signers are the keys to offer in one handshake; done must be called after it.
// The agent is asked each time, since its keys come and go; without a key file
// its failure is an error.
func (k *keyring) signers() (signers []ssh.Signer, done func(), err error) {
	signers = slices.Clone(k.signer)
	if k.agentAt == "" {
		return signers, func() {}, nil
	}
	conn, err := net.Dial("unix", k.agentAt)
	if err == nil {
		var more []ssh.Signer
		if more, err = agent.NewClient(conn).Signers(); err == nil {
			signers = append(signers, more...)
			if len(signers) > 0 {
				return signers, func() { conn.Close() }, nil
			}
			err = errors.New("it holds no key; load one with ssh-add")
		}
		conn.Close()
	}
	if len(signers) > 0 {
		return signers, func() {}, nil
	}
	return nil, nil, fmt.Errorf("ssh-agent at %s: %w", k.agentAt, err)
}

// knownHosts reads the files named, or the usual ones where they exist.
func knownHosts(named []string) (known ssh.HostKeyCallback, files []string, err error) {
	files = named
	if len(named) == 0 {
		usual := []string{"/etc/ssh/ssh_known_hosts"}
		if home, err := os.UserHomeDir(); err == nil {
			usual = append([]string{filepath.Join(home, ".ssh", "known_hosts")}, usual...)
		}
		for _, f := range usual {
			if _, err := os.Stat(f); err == nil {
				files = append(files, f)
			}
		}
	}
	if known, err = knownhosts.New(files...); err != nil {
		return nil, nil, fmt.Errorf("reading the known_hosts files (%s): %w", strings.Join(files, ", "), err)
	}
	return known, files, nil
}

// hostKeyError is a host key we do not trust, and authError a server that does
// not let us in: trying again helps only after somebody has done something.
type (
	hostKeyError struct{ msg string }
	authError    struct{ msg string }
)

func (e *hostKeyError) Error() string { return e.msg }
func (e *authError) Error() string    { return e.msg }

// hostKeyCheck makes what ssh.ClientConfig needs to check the host key of addr.
// The files are read anew for each connection, so that a line added by an
// administrator counts at the next attempt.
func hostKeyCheck(named []string, addr string) (ssh.HostKeyCallback, []string, error) {
	known, files, err := knownHosts(named)
	if err != nil {
		return nil, nil, err
	}
	check := func(hostname string, remote net.Addr, key ssh.PublicKey) error {
		err := known(hostname, remote, key)
		if err == nil {
			return nil
		}
		file := "~/.ssh/known_hosts"
		if len(files) > 0 {
			file = files[0]
		}
		shown := key
		if cert, ok := key.(*ssh.Certificate); ok {
			shown = cert.Key
		}
		name := knownhosts.Normalize(addr)
		line := knownhosts.Line([]string{addr}, shown)
		print := ssh.FingerprintSHA256(shown)
		var ke *knownhosts.KeyError
		var re *knownhosts.RevokedError
		switch {
		case errors.As(err, &re):
			return &hostKeyError{fmt.Sprintf("the host key of %s (%s) is revoked at %s:%d", name, print, re.Revoked.Filename, re.Revoked.Line)}
		case errors.As(err, &ke) && len(ke.Want) == 0:
			return &hostKeyError{fmt.Sprintf("the host key of %s is unknown: if its fingerprint is really %s, add this line to %s: %s", name, print, file, line)}
		case errors.As(err, &ke):
			var old []string
			for _, w := range ke.Want {
				old = append(old, fmt.Sprintf("%s:%d", w.Filename, w.Line))
			}
			return &hostKeyError{fmt.Sprintf("the host key of %s is not the known one (%s): somebody may be listening in; only if the host really has a new key, %s, replace the old line by: %s",
				name, strings.Join(old, ", "), print, line)}
		}
		return &hostKeyError{fmt.Sprintf("the host key of %s (%s) is refused: %v; to trust this key, add this line to %s: %s", name, print, err, file, line)}
	}
	return check, hostKeyAlgorithms(known, addr), nil
}

// hostKeyAlgorithms puts the algorithms of the known keys first. A server has
// keys of several kinds and the client's first choice decides: without this, a
// host known by its RSA key would show its ed25519 key and look unknown. The
// other algorithms stay allowed, so that check can name the key it refuses.
func hostKeyAlgorithms(known ssh.HostKeyCallback, addr string) []string {
	// Asking for a key that nobody has makes knownhosts list the keys it has.
	var ke *knownhosts.KeyError
	if !errors.As(known(addr, &net.TCPAddr{}, noKey{}), &ke) {
		ke = &knownhosts.KeyError{}
	}
	certified, kinds := false, map[string]bool{}
	for _, w := range ke.Want {
		if isAuthority(w) {
			certified = true
		} else {
			kinds[w.Key.Type()] = true
		}
	}
	var certs, first, last []string
	for _, a := range ssh.SupportedAlgorithms().HostKeys {
		kind := a
		if a == ssh.KeyAlgoRSASHA256 || a == ssh.KeyAlgoRSASHA512 {
			kind = ssh.KeyAlgoRSA
		}
		switch {
		case strings.Contains(a, "-cert-"):
			// Only where an authority is known: a certificate of an unknown one
			// is refused, though its plain key may be known.
			if certified {
				certs = append(certs, a)
			}
		case kinds[kind]:
			first = append(first, a)
		default:
			last = append(last, a)
		}
	}
	return slices.Concat(certs, first, last)
}

// isAuthority says whether a line of known_hosts is marked @cert-authority,
// which knownhosts does not tell.
func isAuthority(k knownhosts.KnownKey) bool {
	text, err := os.ReadFile(k.Filename)
	if err != nil {
		return false
	}
	lines := strings.Split(string(text), "\n")
	return k.Line <= len(lines) && strings.HasPrefix(strings.TrimSpace(lines[k.Line-1]), "@cert-authority")
}

// noKey is a public key that equals none.
type noKey struct{}

func (noKey) Type() string                        { return "none" }
func (noKey) Marshal() []byte                     { return nil }
func (noKey) Verify([]byte, *ssh.Signature) error { return errors.New("no key") }
