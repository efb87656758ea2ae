package manager

import "time"

// Loss says that the state was damaged and placements may be missing. Every device that is not known to be free or held
// is withheld then.
type Loss struct {
	Time   time.Time `json:"time"`
	Reason string    `json:"reason"`
	// File is where the damaged state is kept.
	File string `json:"file"`
}
