package knoc

import (
	"embed"
	"fmt"
	"strings"
	"text/template"
)

// templateFS holds every script that knoc runs on the cluster. They are
// embedded, so that one binary is the whole product, and they are plain POSIX
// sh with comments for the administrator who finds them running there.
//
//go:embed templates
var templateFS embed.FS

// templates are parsed once; a field that the data lacks is an error, never an
// empty string in a script.
var templates = template.Must(template.New("").
	Option("missingkey=error").
	Funcs(template.FuncMap{"q": quote}).
	ParseFS(templateFS, "templates/*.tmpl"))

// word is one shell word in its quoted form: text that a POSIX shell reads as
// exactly one argument. Only quote and literal Go constants make words, so no
// text of a user can stand outside a quoted word.
type word string

// quote is the one quoting function: a POSIX shell reads its result as s, byte
// for byte, whatever s holds. Within single quotes every byte but the quote
// itself is literal (POSIX.1-2017, Shell Command Language, 2.2.2). A NUL can be
// in no shell word; checkText refuses it before anything is rendered.
func quote(s string) word {
	return word("'" + strings.ReplaceAll(s, "'", `'\''`) + "'")
}

// render executes the embedded template of the given file name.
func render(name string, data any) (string, error) {
	var b strings.Builder
	if err := templates.ExecuteTemplate(&b, name, data); err != nil {
		return "", fmt.Errorf("rendering %s: %w", name, err)
	}
	return b.String(), nil
}
