package knoc

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"path"
	"regexp"
	"strings"
)

// How a container's variables come from the file env/<container> to the container.
// The file is shell text, read by the process that becomes the runtime: no value
// is on a command line, which everybody can read.
//
// Most variables go the runtime's own way: exported as APPTAINERENV_NAME. But the
// runtime writes these into a shell script of its own, so a name that a shell
// cannot assign spoils all of them, a few names mean something to that shell, and
// CR LF becomes LF in it. These wait under names that a shell can assign, and run/env.pl or run/env.py
// gives them to the runtime as its own environment, which it hands on unread.

var (
	// shellName matches the names a POSIX shell can assign (XBD 3.216, Name).
	shellName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	// envName matches the names that Kubernetes allows.
	envName = regexp.MustCompile(`^[ -<>-~]+$`)
	// refName matches those names that a $(NAME) in an argument may refer to; any
	// other text in parentheses is a command of somebody's shell.
	refName = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)
	// ownMeaning matches names that mean something else in APPTAINERENV_.
	ownMeaning = regexp.MustCompile(`^(UID|EUID|GID|PREPEND_PATH|APPEND_PATH|SING_USER_DEFINED_[A-Z_]*)$`)
	// hostsOwn matches names that mean something to the runtime or to what is linked
	// to it; those are never in its own environment.
	hostsOwn = regexp.MustCompile(`^(PATH|HOME|TMPDIR|TZDIR|LOCPATH|NLSPATH|LOCALDOMAIN|HOSTALIASES|RES_OPTIONS|(LD|GCONV|GETCONF|GLIBC|MALLOC|RESOLV|XDG|GO|APPTAINER|SINGULARITY)[A-Z_]*)$`)
	// runtimesOwn matches names that the runtime lets nobody set.
	runtimesOwn = regexp.MustCompile(`^(APPTAINER|SINGULARITY)_(APPNAME|SHELL)$`)
)

// homeVar is told the runtime by its option for the home directory. With the one
// for no home nothing is mounted there.
const homeVar = "HOME"

// anyUsersHome makes two statements of the one that the runtime writes for a
// variable. For users that the machine does not know, whom pods with users of their
// own have, the runtime takes / for the home directory, whatever it was told, and
// lets nobody set HOME but so.
const anyUsersHome = "_;export HOME"

func isShellName(name string) bool { return shellName.MatchString(name) }

// carried says whether the variable goes by env.pl.
func carried(name string) bool { return !isShellName(name) || ownMeaning.MatchString(name) }

// shellVar is the shell's variable with the value of a container's variable;
// prefix is that of envPrefix.
func shellVar(name, prefix string) string {
	switch {
	case name == homeVar:
		return strings.TrimSuffix(prefix, "ENV_") + "_HOME"
	case carried(name):
		return carriedVar(name)
	}
	return prefix + name
}

func carriedVar(name string) string { return "KNOC_ENV_" + hex.EncodeToString([]byte(name)) }

// textOf is what is known of a value by now.
func textOf(value []valuePart) string {
	text := ""
	for _, p := range value {
		text += p.Text
	}
	return text
}

// argument is the shell word for one element of command or args. $(VAR) refers
// to a variable of the container, which the shell has from env/<container> by
// then: so a secret value is in no script, and an address that only the compute
// node knows needs no special case. A reference to a variable that does not
// exist stays as it is written (kubelet: ExpandContainerCommandAndArgs).
func argument(s, prefix string) word {
	parts := expand(s, func(name string) ([]valuePart, bool) {
		return []valuePart{{Var: name}}, refName.MatchString(name)
	})
	var w word
	for _, p := range parts {
		if p.Var == "" {
			w += quote(p.Text)
			continue
		}
		w += word(fmt.Sprintf(`"${%s-\$(%s)}"`, shellVar(p.Var, prefix), p.Var))
	}
	if w == "" {
		w = quote("")
	}
	return w
}

// envPrefix begins the names of the variables that the runtime hands to the
// container. Apptainer takes Singularity's too, but says so in every log.
func envPrefix(runtime string) string {
	if strings.Contains(path.Base(runtime), "singularity") {
		return "SINGULARITYENV_"
	}
	return "APPTAINERENV_"
}

// envFile is env/<container>. Its last lines put env.pl before the runtime, where
// it is needed. mapped says that the pod has users of its own.
func envFile(vars []envVar, runtime string, mapped bool) ([]byte, error) {
	var b strings.Builder
	var names []string
	prefix := envPrefix(runtime)
	b.WriteString("# A container's environment, written by knoc. It may hold secrets.\n")
	for _, v := range vars {
		if err := checkEnvName("env", v.Name); err != nil {
			return nil, err
		}
		value := quote("")
		if len(v.Value) > 0 {
			value = ""
		}
		for _, p := range v.Value {
			if err := checkText("the environment variable "+v.Name, p.Text); err != nil {
				return nil, err
			}
			switch {
			case p.Var == "":
				value += quote(p.Text)
			case shellName.MatchString(p.Var):
				value += word(`"$` + p.Var + `"`)
			default:
				return nil, fmt.Errorf("the environment variable %s: %q is no shell variable", v.Name, p.Var)
			}
		}
		name := shellVar(v.Name, prefix)
		spoilt := !carried(v.Name) && strings.Contains(textOf(v.Value), "\r\n")
		switch {
		case spoilt && hostsOwn.MatchString(v.Name):
			return nil, refuse("UnsupportedField", "the variable %s has a value with CR LF, which the runtime would change", v.Name)
		case spoilt: // the other name is for arguments
			fmt.Fprintf(&b, "%s=%s\nexport %s=\"$%[1]s\"\n", name, value, carriedVar(v.Name))
		default:
			fmt.Fprintf(&b, "export %s=%s\n", name, value)
		}
		if v.Name == homeVar {
			fmt.Fprintf(&b, "export %s_NO_HOME=1\nhome=''\n", strings.TrimSuffix(prefix, "ENV_"))
			if mapped {
				fmt.Fprintf(&b, "[ -z \"$holder\" ] || export %s=\"$%s\"\n", carriedVar(prefix+anyUsersHome), name)
			}
		}
		if mapped && v.Name == homeVar || spoilt || carried(v.Name) {
			names = append(names, v.Name)
		}
	}
	if len(names) > 0 {
		fmt.Fprintf(&b, `if command -v perl >/dev/null; then carry='perl ./run/env.pl -'
elif command -v python3 >/dev/null; then carry='python3 ./run/env.py -'
else
	printf '%%s\n' %s >&2
	exit 125
fi
`, quote("knoc: neither perl nor python3 is on the compute node, and without them a container cannot have these variables: "+strings.Join(names, ", ")))
	}
	return []byte(b.String()), nil
}

// envHelpers are the files that this env/<container> needs.
func envHelpers(env []byte) ([]file, error) {
	if !bytes.Contains(env, []byte("./run/env.pl")) {
		return nil, nil
	}
	var files []file
	for _, name := range []string{"env.pl", "env.py"} {
		text, err := templateFS.ReadFile("templates/" + name)
		if err != nil {
			return nil, err
		}
		files = append(files, file{Name: "run/" + name, Mode: 0o600, Body: text})
	}
	return files, nil
}
