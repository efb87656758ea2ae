package fair

import "testing"

func TestSubordinateIDsAreOneAccount(t *testing.T) {
	const file = "ada:100000:65536\nbob:165536:65536\nada:300000:10\n\n# text\nx:y:z\ncy:400000:x\ndan:0:0\n"
	for name, c := range map[string]struct{ uid, want uint32 }{
		"a user's own ID":                 {1000, 1000},
		"root":                            {0, 0},
		"the first of a range":            {100000, 100000},
		"the last of a range":             {165535, 100000},
		"another user's":                  {165536, 165536},
		"behind all ranges":               {231072, 231072},
		"one of a user's second range":    {300009, 100000},
		"behind a user's second range":    {300010, 300010},
		"a range whose size is no number": {400000, 400000},
		"the highest":                     {1<<32 - 1, 1<<32 - 1},
	} {
		t.Run(name, func(t *testing.T) {
			if got := accountIn(file, c.uid); got != c.want {
				t.Errorf("account %d, want %d", got, c.want)
			}
		})
	}
}

func TestWhoGivesWay(t *testing.T) {
	for name, c := range map[string]struct {
		places []uint32
		to     uint32
		want   int
	}{
		"the newest of who has most":             {[]uint32{1, 2, 1, 2, 1, 2, 1, 2, 2, 3}, 4, 8},
		"nobody, if all would have as many":      {[]uint32{1, 2, 3}, 4, -1},
		"nobody, if the other would have more":   {[]uint32{1, 1, 2, 2, 3}, 1, -1},
		"nobody, if they would change places":    {[]uint32{1, 1, 2}, 2, -1},
		"who has two more":                       {[]uint32{1, 1, 1, 2}, 2, 2},
		"anyone, for root":                       {[]uint32{1, 2}, 0, 0},
		"who has most, for root":                 {[]uint32{1, 2, 2, 0, 0, 0}, 0, 2},
		"not root":                               {[]uint32{0, 0, 0, 0}, 1, -1},
		"not root for root":                      {[]uint32{0, 0, 0}, 0, -1},
		"nobody, if there is nobody":             {nil, 1, -1},
		"the newest, behind others with as many": {[]uint32{1, 2, 1, 2, 1, 2}, 3, 4},
	} {
		t.Run(name, func(t *testing.T) {
			if got := GivesWay(c.places, c.to); got != c.want {
				t.Errorf("place %d, want %d", got, c.want)
			}
		})
	}
}
