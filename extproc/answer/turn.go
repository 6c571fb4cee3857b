package answer

import (
	"encoding/json"
	"errors"
	"time"

	"tandem/extproc/kvtransfer"
)

// storedTurn is the stored form of a turn.
type storedTurn struct {
	Until int64           `json:"until"` // Unix time in milliseconds
	Turn  json.RawMessage `json:"turn"`
}

// WriteTurn returns the stored form of a turn whose blocks D keeps until a time.
func WriteTurn(turn *kvtransfer.Turn, until time.Time) ([]byte, error) {
	text, err := turn.Marshal()
	if err != nil {
		return nil, err
	}
	return json.Marshal(storedTurn{until.UnixMilli(), text})
}

// ErrTurnExpired is the error of a stored turn whose time is over.
var ErrTurnExpired = errors.New("its time is over")

// ReadTurn reads the stored form of a turn at a time. After its time the error is [ErrTurnExpired].
func ReadTurn(text []byte, now time.Time) (turn *kvtransfer.Turn, until time.Time, err error) {
	var kept storedTurn
	if err := json.Unmarshal(text, &kept); err != nil {
		return nil, until, err
	}
	if until = time.UnixMilli(kept.Until); !now.Before(until) {
		return nil, until, ErrTurnExpired
	}
	turn, err = kvtransfer.UnmarshalTurn(kept.Turn)
	return turn, until, err
}
