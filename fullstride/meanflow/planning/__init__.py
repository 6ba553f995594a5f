"""What a run will take, predicted from counted work and the rates that measured steps reached."""
