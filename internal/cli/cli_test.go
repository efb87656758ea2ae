package cli

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
)

func TestReport(t *testing.T) {
	err := With(NoDriver, "install <one>", errors.Join(errors.New("no driver"), errors.New("none at all")))
	for name, c := range map[string]struct {
		err    error
		asJSON bool
		want   string
	}{
		"in words": {err, false, "error: no driver\nerror: none at all\nhint: install <one>\n"},
		"as JSON":  {err, true, `{"error":"no driver\nnone at all","code":10,"hint":"install <one>"}` + "\n"},
		"of several arguments": {
			errors.Join(errors.New("no manager"), errors.New("no manager"), errors.New("x")), false,
			"error: no manager\nerror: x\n",
		},
		"with line breaks in names": {
			With(Failure, "remove a\nb", fmt.Errorf("open a\nb: %w", errors.Join(errors.New("c\r\nd"), errors.New("e")))), false,
			"error: open a b: c d\nerror: e\nhint: remove a b\n",
		},
		"without a hint": {errors.New("x"), false, "error: x\n"},
		"that controls a terminal": {
			errors.New("\x1b]0;x\x1b\\ a\rb\tü\u202e"), false, `error: \x1b]0;x\x1b\ a\rb\tü\u202e` + "\n",
		},
		"as JSON without it": {errors.New("x"), true, `{"error":"x","code":1}` + "\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			Report(&b, c.err, c.asJSON)
			if diff := cmp.Diff(c.want, b.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestHelpListsTheExitStatuses(t *testing.T) {
	meanings := map[Code]string{OK: "done", Interrupted: "interrupted"}
	root := &cobra.Command{Use: "program"}
	root.AddCommand(&cobra.Command{
		Use: "verb", Long: "Does it.", Annotations: Statuses(OK, Interrupted),
		Run: func(*cobra.Command, []string) {},
	})
	root.SetHelpFunc(Help(meanings))
	root.SetHelpCommand(HelpCommand())
	for _, args := range [][]string{{"verb", "--help"}, {"help", "verb"}} {
		var b strings.Builder
		root.SetOut(&b)
		root.SetArgs(args)
		testenv.Must(t, root.Execute())
		got := b.String()
		if !strings.HasPrefix(got, "Does it.\n\nUsage:") ||
			!strings.HasSuffix(got, "\nExit Status:\n    0  done\n  130  interrupted\n") {
			t.Errorf("%v prints:\n%s", args, got)
		}
	}
	root.SetArgs([]string{"help", "nothing"})
	if err := root.Execute(); CodeOf(err) != Usage || HintOf(err) != "see program --help" {
		t.Errorf("help about nothing: %v with hint %q", err, HintOf(err))
	}
}
