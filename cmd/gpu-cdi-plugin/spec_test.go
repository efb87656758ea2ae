package main

import (
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestTheHookBelongsToTheProgram(t *testing.T) {
	for name, c := range map[string]struct {
		hooks []string
		want  string
	}{
		"beside the program": {[]string{"bin/prestart-hook"}, "bin/prestart-hook"},
		"of a package":       {[]string{"libexec/gpu-cdi-plugin/prestart-hook"}, "libexec/gpu-cdi-plugin/prestart-hook"},
		"the one beside is used": {
			[]string{"bin/prestart-hook", "libexec/gpu-cdi-plugin/prestart-hook"}, "bin/prestart-hook",
		},
		"none": {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			for _, hook := range c.hooks {
				testenv.Must(t, os.MkdirAll(filepath.Join(top, filepath.Dir(hook)), 0o755),
					os.WriteFile(filepath.Join(top, hook), nil, 0o755))
			}
			got, err := findHook(filepath.Join(top, "bin"))
			if c.want == "" {
				if err == nil {
					t.Errorf("the hook is %s", got)
				}
				return
			}
			if want := filepath.Join(top, c.want); err != nil || got != want {
				t.Errorf("the hook is %s (%v), want %s", got, err, want)
			}
		})
	}
}
